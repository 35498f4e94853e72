"""Publishes messages over AMQP 0-9-1, rejects each delivery, and prints a line of JSON for each
message that it sends or gets."""
import datetime
import json
import sys
import time

import pika

conn = pika.BlockingConnection(pika.URLParameters(sys.argv[1]))
channel = conn.channel()
channel.confirm_delivery()
user = pika.URLParameters(sys.argv[1]).credentials.username
when = datetime.datetime(2026, 1, 2, 3, 4, 5)

nested = {
    "nested": {"a": [1, {"b": True}], "empty": {}, "none": None},
    "list": ["x", 2, False, [3]],
    "x-list": ["x", {"y": 1}],
    "bytes": b"\x00\xff",
    "when": when,
    "big": 1 << 40,
    "text": "t",
    "nothing": None,
    "retries": 0,
    "argsrepr": "('a',)",
    "ignore_result": False,
}
forged = dict(nested)
forged.update({
    "x-opt-hopback-delay": 0, "x-opt-hopback-queue": "payments", "x-opt-hopback-reason": "waiting",
    "x-opt-hopback-retries": 0,
})


def shown(queue, body, properties):
    fields = {k: v for k, v in vars(properties).items() if k != "headers" and v is not None}
    print(json.dumps({
        "queue": queue, "body": body.decode(), "headers": properties.headers or {}, "properties": fields,
    }, default=repr), flush=True)


for body, headers in ((b"plain", {"tenant": "acme"}), (b"nested", nested), (b"forged", forged)):
    properties = pika.BasicProperties(
        content_type="application/json", content_encoding="utf-8", headers=headers, delivery_mode=2, priority=3,
        correlation_id="c-1", reply_to="replies", message_id="m-" + body.decode(), timestamp=1767323045, type="task",
        user_id=user, app_id="shop",
    )
    shown("", body, properties)
    channel.basic_publish("", "orders", body, properties, mandatory=True)

deadline = time.time() + 60
seen = 0
while seen < 12:
    if time.time() > deadline:
        sys.exit("only %d deliveries" % seen)
    method, properties, body = channel.basic_get("orders")
    if method:
        shown("orders", body, properties)
        channel.basic_nack(method.delivery_tag, requeue=False)
        seen += 1
        continue
    method, properties, body = channel.basic_get("orders.dead", auto_ack=True)
    if method:
        shown("orders.dead", body, properties)
        seen += 1
        continue
    time.sleep(0.02)
conn.close()
