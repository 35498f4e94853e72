"""A client of a broker. Each line of its input is a command, and gets one line as its answer."""
import os

from proton import Condition, Delivery, Endpoint, Handler, Message
from proton.utils import BlockingConnection

host, vhost, user, password = sys.argv[1:5]

OUTCOMES = {"accept": Delivery.ACCEPTED, "release": Delivery.RELEASED, "reject": Delivery.REJECTED, "modify": Delivery.MODIFIED}


class Ends(Handler):
    """A link's handler that keeps what ended the link or the connection."""

    def __init__(self):
        super().__init__()
        self.end = None
        self.got = []

    def on_delivery(self, event):
        d = event.delivery
        if not d.link.is_receiver or not d.readable or d.partial:
            return
        self.got.append((d.link.recv(d.pending), d))
        d.link.advance()

    def on_link_remote_close(self, event):
        self.end = self.end or ("link", event.link.remote_condition)
        event.link.close()


class Broker(BlockingConnection):
    """The connection, which is opened again after its end."""

    end = None

    def on_session_remote_close(self, event):
        self.end = self.end or ("session", event.session.remote_condition)
        event.session.close()

    def on_connection_remote_close(self, event):
        self.end = ("connection", event.connection.remote_condition)
        event.connection.close()


class Client:
    max_frame = None

    def __init__(self):
        self.conn = None
        self.attached = None
        self.kept = []  # a blocking link takes its handler along when it isn't used any more

    def connection(self):
        if self.conn is None:
            self.conn = Broker(
                "amqp://" + host, timeout=float(sys.argv[5]), user=user, password=password, allowed_mechs="PLAIN",
                virtual_host="vhost:" + vhost, max_frame_size=self.max_frame,
            )
        return self.conn

    def sender(self, to):
        handler = Ends()
        self.kept.append(self.connection().create_sender(to, handler=handler))
        return self.kept[-1].link, handler

    def receiver(self, source):
        handler = Ends()
        self.kept.append(self.connection().create_receiver(source, credit=0, handler=handler))
        return self.kept[-1].link, handler

    def until(self, handler, yes, what):
        """Waits until yes() or the end of the link, and returns that end."""
        self.conn.wait(lambda: yes() or handler.end or self.conn.end, msg=what)
        return None if yes() else self.ended(handler)

    def ended(self, handler):
        scope, condition = self.conn.end or handler.end
        self.leave()  # what is left of it is of no use
        return {"scope": scope, "condition": condition and condition.name, "description": condition and condition.description}

    def leave(self):
        if self.conn is not None:
            self.conn.close()
        self.conn, self.attached, self.kept = None, None, []

    def finish(self, link):
        link.close()
        self.conn.wait(lambda: not link.state & Endpoint.REMOTE_ACTIVE, msg="a detach")

    def transmit(self, to, raws):
        """Sends encoded messages as credit comes, and returns the answers to them."""
        link, handler = self.sender(to)
        sent = []
        for raw in raws:
            end = self.until(handler, lambda: link.credit > 0, "credit")
            if end:
                return {"end": end}
            sent.append(link.delivery(link.delivery_tag()))
            if link.stream(raw) != len(raw):
                raise IOError("a part of a message")
            link.advance()
        answers = []
        for d in sent:
            end = self.until(handler, lambda: d.settled, "an answer")
            if end:
                return {"end": end}
            answers.append({"state": str(d.remote_state), "condition": d.remote.condition and d.remote.condition.name})
            d.settle()
        self.finish(link)
        return {"answers": answers}

    def do_send(self, c):
        return self.transmit(c["to"], [
            encoded(m["sections"]) if "sections" in m else api_message(m["api"]).encode() for m in c["messages"]
        ])

    def do_burst(self, c):
        """Sends messages whose body begins with their number."""
        return self.transmit(c["to"], [encoded([[0x75, ["binary", body(*m).hex()]]]) for m in enumerate(c["sizes"])])

    def do_receive(self, c):
        link, handler = self.receiver(c["from"])
        link.flow(c["n"])
        end = self.until(handler, lambda: len(handler.got) >= c["n"], "%d messages" % c["n"])
        if end:
            return {"end": end}
        messages, numbers = [], []
        for raw, d in handler.got:
            settle(d, c["outcome"])
            if c.get("numbers"):
                numbers.append(number_of(raw))
            else:
                messages.append({"sections": decoded(raw), "api": api_shown(raw)})
        self.finish(link)
        return {"messages": messages, "numbers": numbers}

    def do_attach(self, c):
        """Takes messages, and keeps them."""
        self.attached = self.receiver(c["from"])
        self.attached[0].flow(c["n"])
        end = self.until(self.attached[1], lambda: len(self.attached[1].got) >= c["n"], "%d messages" % c["n"])
        return {"end": end}

    def do_end(self, c):
        """Waits for the broker's end of the attached link."""
        return {"end": self.until(self.attached[1], lambda: False, "the end of the link")}

    def do_leave(self, c):
        """Ends the attached link, its session or the connection with an error, and settles nothing."""
        link = self.attached[0]
        what = {"link": link, "session": link.session, "connection": self.conn.conn}[c["scope"]]
        what.condition = Condition("amqp:internal-error", "the worker leaves")
        if c["scope"] != "connection":
            what.close()
            self.conn.wait(lambda: not what.state & Endpoint.REMOTE_ACTIVE, msg="the end")
        self.leave()
        return {}

    def do_frames(self, c):
        """Has the next connection take smaller frames."""
        self.leave()
        self.max_frame = c["max"]
        return {}


def body(number, size):
    """A body that begins with its number, and can't be mistaken for another."""
    head = b"%d " % number
    return (head + b"0123456789abcdef" * (size // 16 + 1))[:max(size, len(head))]


def number_of(raw):
    """The number of a message of bodies like these, which may be in several data sections."""
    text = b"".join(bytes.fromhex(value[1]) for code, value in decoded(raw) if code == 0x75)
    number = int(text.split(b" ", 1)[0])
    if body(number, len(text)) != text:
        raise ValueError("message %d is damaged" % number)
    return number


def settle(d, o):
    if o.get("annotations"):
        d.local.annotations = read(o["annotations"])
    if o.get("condition"):
        d.local.condition = Condition(o["condition"], o.get("description"), read(o["info"]) if "info" in o else None)
    d.local.failed = o.get("failed", False)
    d.local.undeliverable = o.get("undeliverable", False)
    d.update(OUTCOMES[o["outcome"]])
    d.settle()


# What proton's own Message calls the header and the properties.
FIELDS = (
    "inferred", "durable", "priority", "ttl", "first_acquirer", "delivery_count", "id", "user_id", "address", "subject", "reply_to",
    "correlation_id", "content_type", "content_encoding", "expiry_time", "creation_time", "group_id", "group_sequence",
    "reply_to_group_id", "instructions", "annotations", "properties", "body",
)


def api_message(fields):
    m = Message()
    for name, value in fields.items():
        setattr(m, name, read(value))
    return m


def api_shown(raw):
    m = Message()
    m.decode(raw)
    fields = {}
    for name in FIELDS:
        v = getattr(m, name)
        if v is not None and v != "" and v != b"":
            fields[name] = shown(v)
    return fields


client = Client()
for line in sys.stdin:
    command = json.loads(line)
    say(**getattr(client, "do_" + command["do"])(command))
client.leave()
os._exit(0)  # proton may wait for what has ended
