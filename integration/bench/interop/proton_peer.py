"""A peer of a client of AMQP 1.0 that is no broker: proton accepts connections. What a connection is
like is in the host that its client asks for, and what a link does is in its address. Each thing that
happens is a line."""
import hashlib
import os
import threading

from proton import Condition, Delivery, Endpoint, Handler, Link, Terminus, Transport
from proton._handlers import IOHandler
from proton._reactor import Acceptor
from proton.reactor import Container

# A value of every type, which open, attach, detach and outcomes carry.
EVERYTHING = {
    symbol("null"): None, symbol("true"): True, symbol("false"): False, symbol("ubyte"): ubyte(255), symbol("ushort"): ushort(65535),
    symbol("uint0"): uint(0), symbol("uint"): uint(1 << 31), symbol("ulong0"): ulong(0), symbol("ulong"): ulong((1 << 64) - 1),
    symbol("byte"): byte(-128), symbol("short"): short(-32768), symbol("int5"): int32(5), symbol("int"): int32(-(1 << 31)),
    symbol("long5"): -5, symbol("long"): -(1 << 63), symbol("float"): float32(1.5), symbol("double"): -2.25,
    symbol("decimal32"): decimal32(0x01020304), symbol("decimal64"): decimal64(0x0102030405060708),
    symbol("decimal128"): decimal128(bytes(range(16))), symbol("char"): char("\U0001f407"), symbol("timestamp"): timestamp(-1),
    symbol("uuid"): uuid.UUID(int=7), symbol("binary"): b"\x00\xff", symbol("empty"): b"", symbol("large"): b"x" * 256,
    symbol("string"): "text \u00e9\U0001f407", symbol("symbol"): symbol("a symbol"), symbol("list0"): [], symbol("list"): ["a", 1, None, [True]],
    symbol("map0"): {}, symbol("map"): {"k": "v", 1: ubyte(1)}, symbol("array"): Array(UNDESCRIBED, Data.INT, int32(-100000), int32(2)),
    symbol("array0"): Array(UNDESCRIBED, Data.STRING), symbol("arrays"): Array(UNDESCRIBED, Data.SYMBOL, symbol("a"), symbol("b")),
    symbol("described"): Described(symbol("x:y"), [1]), symbol("described array"): Array(ulong(7), Data.STRING, "a"),
}


def body(number, size):
    """A payload that begins with its number, and can't be mistaken for another."""
    head = b"%d " % number
    return (head + b"0123456789abcdef" * (size // 16 + 1))[:size]


class Peer(Handler):
    def __init__(self):
        super().__init__()
        self.links = {}  # what is known of a link, by its object's name and direction

    def of(self, link):
        return self.links.setdefault((link.connection.remote_container, link.name, link.is_sender), {"sent": 0, "got": 0, "kept": [], "parts": b""})

    def on_connection_bound(self, event):
        if event.connection._acceptor is not plain:
            event.transport.sasl().allowed_mechs("ANONYMOUS")

    def on_connection_remote_open(self, event):
        c, t = event.connection, event.transport
        asked = dict(part.split("=") for part in (c.remote_hostname or "").split(",") if "=" in part)
        if "frame" in asked:
            t.max_frame_size = int(asked["frame"])
        if "idle" in asked:
            t.idle_timeout = float(asked["idle"])
        if "channels" in asked:
            t.channel_max = int(asked["channels"])
        if "everything" in asked:
            c.properties = EVERYTHING
        c.container = "proton"
        # Proton makes a list of a list of symbols, where AMQP has an array.
        lists = "lists" in asked
        c.offered_capabilities = [symbol("one"), symbol("two")] if lists else Array(UNDESCRIBED, Data.SYMBOL, symbol("one"), symbol("two"))
        say(event="open", user=t.user, frame=t.remote_max_frame_size, idle=t.remote_idle_timeout, properties=shown(c.remote_properties))
        if "refuse" in asked:
            c.condition = Condition("amqp:not-allowed", "not you")
            c.open()
            c.close()
            return
        c.open()
        if "silent" in asked:
            self.silence = event.container.schedule(0.2, Silence())

    def on_session_remote_open(self, event):
        event.session.open()

    def on_link_remote_open(self, event):
        link = event.link
        address = link.remote_source.address if link.is_sender else link.remote_target.address
        link.source.copy(link.remote_source)
        link.target.copy(link.remote_target)
        of = self.of(link)
        of["does"], of["args"] = (address or "").split(":")[0], [int(a) for a in (address or "").split(":")[1:]]
        say(event="attach", address=address, properties=shown(link.remote_properties))
        link.properties = EVERYTHING if of["does"] == "everything" else None
        if of["does"] == "refuse":
            (link.source if link.is_sender else link.target).type = Terminus.UNSPECIFIED
            link.condition = Condition("amqp:not-found", "no such node", {symbol("why"): ["because", 1]})
            link.open()
            link.close()
            return
        if of["does"] == "second":
            link.rcv_settle_mode = Link.RCV_SECOND
        link.open()
        if link.is_receiver:
            link.flow(of["args"][0] if of["args"] else 10)

    # What the client receives.

    def on_link_flow(self, event):
        link = event.link
        of = self.of(link)
        if link.is_receiver:
            if of.pop("draining", False):
                say(event="emptied", credit=link.drained())
                link.flow(1)
            return
        if link.state & Endpoint.LOCAL_CLOSED:
            return
        more = getattr(self, "send_" + of["does"].replace("-", "_"), None)
        if more:
            more(link, of)
        if link.drain_mode and link.credit > 0:
            say(event="drained", credit=link.drained())

    def message(self, link, of, raw, settled=False):
        d = link.delivery("%d" % of["sent"])
        of["sent"] += 1
        link.stream(raw)
        link.advance()
        if settled:
            d.settle()
        return d

    def send_count(self, link, of):
        """count:N:SIZE:STEP sends N messages, each larger than the last by STEP."""
        n, size, step = (of["args"] + [0, 0])[:3]
        while of["sent"] < n and link.credit > 0:
            self.message(link, of, body(of["sent"], size + of["sent"] * step))

    def send_settled(self, link, of):
        while of["sent"] < of["args"][0] and link.credit > 0:
            self.message(link, of, body(of["sent"], of["args"][1]), settled=True)

    def send_aborted(self, link, of):
        """Every second message is begun and then taken back."""
        if of["sent"] < of["args"][0] and link.credit > 0 and "open" not in of:
            if of["sent"] % 2 == 0:
                of["open"] = link.delivery("%d" % of["sent"])
                of["sent"] += 1
                link.stream(body(of["sent"], of["args"][1]))
                # The rest comes when this was written, which a timer shows that comes later.
                container.schedule(0.01, Later(lambda: self.abort(link, of)))
                return
            self.message(link, of, body(of["sent"], of["args"][1]))
            self.send_aborted(link, of)

    def abort(self, link, of):
        of.pop("open").abort()
        self.send_aborted(link, of)

    def send_ends(self, link, of, scope):
        if of["sent"] == 0 and link.credit > 0:
            self.message(link, of, body(0, 100))
            what = {"link": link, "session": link.session, "connection": link.connection}[scope]
            what.condition = Condition("amqp:internal-error", "on purpose", EVERYTHING)
            what.close()

    def send_end_link(self, link, of):
        self.send_ends(link, of, "link")

    def send_end_session(self, link, of):
        self.send_ends(link, of, "session")

    def send_end_connection(self, link, of):
        self.send_ends(link, of, "connection")

    # What the client sends, and outcomes both ways.

    def on_delivery(self, event):
        d = event.delivery
        if d.link.is_receiver:
            self.received(d, event)
        elif d.updated:
            r = d.remote
            if d.remote_state or d.settled:
                say(event="outcome", tag=d.tag, state=str(d.remote_state), settled=bool(d.settled), failed=bool(r.failed), undeliverable=bool(r.undeliverable),
                    annotations=shown(r.annotations), condition=r.condition and r.condition.name, description=r.condition and r.condition.description,
                    info=shown(r.condition.info if r.condition else None))
            if d.settled:
                d.settle()

    def received(self, d, event):
        link = d.link
        of = self.of(link)
        if d.aborted:
            d.settle()
            return
        if d.readable:
            part = link.recv(d.pending)
            of["parts"] += part or b""
        if d.partial:
            return
        if d.local_state:  # the client has settled what this end settles second
            if d.settled:
                say(event="settled", state=str(d.remote_state))
                d.settle()
            return
        raw, of["parts"] = of["parts"], b""
        link.advance()
        of["got"] += 1
        say(event="message", size=len(raw), sum=hashlib.sha256(raw).hexdigest())
        getattr(self, "take_" + of["does"].replace("-", "_"))(link, of, d)

    def settle(self, d, state):
        d.update(state)
        d.settle()

    def take_accept(self, link, of, d):
        """accept:CREDIT gives that much credit again when it is used up."""
        self.settle(d, Delivery.ACCEPTED)
        if link.credit == 0:
            link.flow(of["args"][0] if of["args"] else 10)

    def take_outcomes(self, link, of, d):
        """Each in its turn."""
        n = of["got"] % 5
        if n == 2:
            d.local.condition = Condition("amqp:precondition-failed", "refused", EVERYTHING)
        if n == 4:
            d.local.failed = d.local.undeliverable = True
            d.local.annotations = EVERYTHING
        self.settle(d, {1: Delivery.ACCEPTED, 2: Delivery.REJECTED, 3: Delivery.RELEASED, 4: Delivery.MODIFIED, 0: Delivery.MODIFIED}[n])
        link.flow(1)

    def take_second(self, link, of, d):
        d.update(Delivery.ACCEPTED)
        link.flow(1)

    def take_backwards(self, link, of, d):
        """backwards:CREDIT settles that many at once, the last first."""
        of["kept"].append(d)
        if len(of["kept"]) == of["args"][0]:
            for d in reversed(of["kept"]):
                self.settle(d, Delivery.ACCEPTED)
            of["kept"] = []
            link.flow(of["args"][0])

    def take_forwards(self, link, of, d):
        """The same in one range, or nearly."""
        of["kept"].append(d)
        if len(of["kept"]) == of["args"][0]:
            for d in of["kept"]:
                self.settle(d, Delivery.ACCEPTED)
            of["kept"] = []
            link.flow(of["args"][0])

    def take_unsettled(self, link, of, d):
        pass

    def take_drain(self, link, of, d):
        """Takes one message, has the client drop the rest of its credit, and gives credit for one more."""
        self.settle(d, Delivery.ACCEPTED)
        if of["got"] == 1:
            of["draining"] = True
            link.drain(0)

    def take_everything(self, link, of, d):
        self.settle(d, Delivery.ACCEPTED)

    def take_ends(self, link, scope):
        what = {"link": link, "session": link.session, "connection": link.connection}[scope]
        what.condition = Condition("amqp:internal-error", "on purpose", EVERYTHING)
        what.close()

    def take_end_link(self, link, of, d):
        self.take_ends(link, "link")

    def take_end_session(self, link, of, d):
        self.take_ends(link, "session")

    def take_end_connection(self, link, of, d):
        self.take_ends(link, "connection")

    # Ends.

    def ended(self, scope, what):
        c = what.remote_condition
        say(event="end", scope=scope, condition=c and c.name, description=c and c.description)
        if not what.state & Endpoint.LOCAL_CLOSED:
            what.close()

    def on_link_remote_detach(self, event):
        say(event="end", scope="suspended link", condition=None)

    def on_link_remote_close(self, event):
        self.ended("link", event.link)

    def on_session_remote_close(self, event):
        self.ended("session", event.session)

    def on_connection_remote_close(self, event):
        self.ended("connection", event.connection)

    def on_transport_error(self, event):
        c = event.transport.condition
        say(event="error", condition=c and c.name, description=c and c.description)


class Later(Handler):
    def __init__(self, do):
        super().__init__()
        self.do = do

    def on_timer_task(self, event):
        self.do()


class Silence(Handler):
    """Reads and writes nothing more, as a process that hangs."""

    def on_timer_task(self, event):
        say(event="silence")
        threading.Event().wait()


class PlainAcceptor(Acceptor):
    """Accepts connections that log in with PLAIN, which proton's own library leaves to Cyrus'. So SASL's frames
    are written here, in proton's encoding, and proton takes over behind them."""

    def on_selectable_readable(self, event):
        sock, _ = event.selectable.accept()
        sock.settimeout(10)
        user = login(sock)
        if user is None:
            sock.close()
            return
        sock.setblocking(False)
        c = self._reactor.connection(self._reactor.handler)
        c._acceptor = self
        t = Transport(Transport.SERVER)
        t.bind(c)
        s = self._reactor.selectable(delegate=sock)
        s._transport, t._selectable = t, s
        IOHandler.update(t, s, self._reactor.now)
        say(event="login", user=user)


def login(sock):
    def exactly(n):
        b = b""
        while len(b) < n:
            b += sock.recv(n - len(b)) or sys.exit("the client is gone")
        return b

    def frame(code, *fields):
        d = Data()
        d.put_object(Described(ulong(code), list(fields)))
        b = d.encode()
        return struct.pack(">IBBH", 8 + len(b), 2, 1, 0) + b

    assert exactly(8) == b"AMQP\x03\x01\x00\x00"
    mechanisms = Array(UNDESCRIBED, Data.SYMBOL, symbol("PLAIN"), symbol("SCRAM-SHA-256"))
    sock.sendall(b"AMQP\x03\x01\x00\x00" + frame(0x40, mechanisms))
    size, offset, kind, _ = struct.unpack(">IBBH", exactly(8))
    assert kind == 1
    d = Data()
    d.decode(exactly(size - 8)[4 * offset - 8:])
    d.rewind()
    d.next()
    init = d.get_object()
    assert init.descriptor == 0x41
    mechanism, response = init.value[:2]
    if mechanism == "PLAIN" and response == b"\x00user\x00password":
        sock.sendall(frame(0x44, ubyte(0)))
        return "user"
    sock.sendall(frame(0x44, ubyte(1)))
    return None


container = Container(Peer())
acceptor = container.acceptor("127.0.0.1", 0)
plain = PlainAcceptor(container, "127.0.0.1", 0)
ports = [a._selectable._delegate.getsockname()[1] for a in (acceptor, plain)]
say(event="listening", anonymous=ports[0], plain=ports[1])


def end_with_input():
    sys.stdin.read()
    os._exit(0)


threading.Thread(target=end_with_input, daemon=True).start()
container.run()
