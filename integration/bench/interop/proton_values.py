"""Values of AMQP in JSON: a value is its type and what it holds, such as ["ulong", "7"]. Numbers
are texts, floating-point numbers, decimals and bytes are hexadecimal, and a map is a list of pairs."""
import json
import struct
import sys
import uuid

from proton import (
    Array, Data, Described, UNDESCRIBED, byte, char, decimal128, decimal32, decimal64, float32, int32, short, symbol,
    timestamp, ubyte, uint, ulong, ushort,
)

NUMBERS = {
    "ubyte": ubyte, "ushort": ushort, "uint": uint, "ulong": ulong, "byte": byte, "short": short, "int": int32, "long": int,
    "timestamp": timestamp,
}
NAMES = {c: name for name, c in NUMBERS.items()}


def shown(v):
    c = v.__class__
    if v is None:
        return ["null"]
    if c is bool:
        return ["boolean", v]
    if c in NAMES:
        return [NAMES[c], str(int(v))]
    if c is float32:
        return ["float", struct.pack(">f", v).hex()]
    if c is float:
        return ["double", struct.pack(">d", v).hex()]
    if c is decimal32:
        return ["decimal32", struct.pack(">I", v).hex()]
    if c is decimal64:
        return ["decimal64", struct.pack(">Q", v).hex()]
    if c is decimal128:
        return ["decimal128", bytes(v).hex()]
    if c is char:
        return ["char", "%x" % ord(v)]
    if c is uuid.UUID:
        return ["uuid", v.bytes.hex()]
    if c is bytes or c is memoryview:
        return ["binary", bytes(v).hex()]
    if c is symbol:
        return ["symbol", str(v)]
    if c is str:
        return ["string", v]
    if isinstance(v, Described):
        return ["described", shown(v.descriptor), shown(v.value)]
    if isinstance(v, Array):
        described = [] if v.descriptor is UNDESCRIBED else [shown(v.descriptor)]
        return ["array", Data.type_name(v.type), [shown(e) for e in v.elements]] + described
    if isinstance(v, dict):
        return ["map", [[shown(k), shown(e)] for k, e in v.items()]]
    if isinstance(v, (list, tuple)):
        return ["list", [shown(e) for e in v]]
    raise TypeError("%r of %s" % (v, c))


TYPES = {Data.type_name(t): t for t in (
    Data.NULL, Data.BOOL, Data.UBYTE, Data.BYTE, Data.USHORT, Data.SHORT, Data.UINT, Data.INT, Data.CHAR, Data.ULONG, Data.LONG,
    Data.TIMESTAMP, Data.FLOAT, Data.DOUBLE, Data.DECIMAL32, Data.DECIMAL64, Data.DECIMAL128, Data.UUID, Data.BINARY,
    Data.STRING, Data.SYMBOL, Data.DESCRIBED, Data.ARRAY, Data.LIST, Data.MAP,
)}


def read(j):
    kind, args = j[0], j[1:]
    if kind == "null":
        return None
    if kind == "boolean":
        return args[0]
    if kind in NUMBERS:
        return NUMBERS[kind](int(args[0]))
    if kind == "float":
        return float32(struct.unpack(">f", bytes.fromhex(args[0]))[0])
    if kind == "double":
        return struct.unpack(">d", bytes.fromhex(args[0]))[0]
    if kind == "decimal32":
        return decimal32(int(args[0], 16))
    if kind == "decimal64":
        return decimal64(int(args[0], 16))
    if kind == "decimal128":
        return decimal128(bytes.fromhex(args[0]))
    if kind == "char":
        return char(chr(int(args[0], 16)))
    if kind == "uuid":
        return uuid.UUID(hex=args[0])
    if kind == "binary":
        return bytes.fromhex(args[0])
    if kind == "symbol":
        return symbol(args[0])
    if kind == "string":
        return args[0]
    if kind == "described":
        return Described(read(args[0]), read(args[1]))
    if kind == "array":
        return Array(read(args[2]) if len(args) > 2 else UNDESCRIBED, TYPES[args[0]], *[read(e) for e in args[1]])
    if kind == "map":
        return {read(k): read(e) for k, e in args[0]}
    if kind == "list":
        return [read(e) for e in args[0]]
    raise ValueError(kind)


def encoded(sections):
    """A message of sections, each a code and a value."""
    raw = b""
    for code, value in sections:
        d = Data()
        d.put_object(Described(ulong(code), read(value)))
        raw += d.encode()
    return raw


def decoded(raw):
    sections = []
    while raw:
        d = Data()
        size = d.decode(raw)
        d.rewind()
        d.next()
        section = d.get_object()
        sections.append([int(section.descriptor), shown(section.value)])
        raw = raw[size:]
    return sections


def say(**fields):
    print(json.dumps(fields), flush=True)
