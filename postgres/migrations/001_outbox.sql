-- The outbox: messages that transactions have committed, and that a relay publishes.

-- An id is taken when a message is written. Its cache must stay 1: messages of one
-- session would otherwise get ids out of order.
CREATE SEQUENCE hopback_outbox_id AS bigint CACHE 1;

-- A segment holds 131,072 ids in a row. A relay truncates a segment once all its messages
-- are published, so that deleted rows go even while an old snapshot holds VACUUM back.
CREATE TABLE hopback_outbox (
	id           bigint      NOT NULL,
	segment      smallint    NOT NULL,  -- (id >> 17) & 15
	message      bytea       NOT NULL,  -- in AMQP 1.0's encoding
	message_id   text        NOT NULL,
	address      text        NOT NULL,
	key          text,                  -- messages with the same key keep their order
	created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
	failed_since timestamptz,           -- of the first failed attempt to publish it
	failure      text,
	PRIMARY KEY (id, segment)
) PARTITION BY LIST (segment);

CREATE TABLE hopback_outbox_0  PARTITION OF hopback_outbox FOR VALUES IN (0);
CREATE TABLE hopback_outbox_1  PARTITION OF hopback_outbox FOR VALUES IN (1);
CREATE TABLE hopback_outbox_2  PARTITION OF hopback_outbox FOR VALUES IN (2);
CREATE TABLE hopback_outbox_3  PARTITION OF hopback_outbox FOR VALUES IN (3);
CREATE TABLE hopback_outbox_4  PARTITION OF hopback_outbox FOR VALUES IN (4);
CREATE TABLE hopback_outbox_5  PARTITION OF hopback_outbox FOR VALUES IN (5);
CREATE TABLE hopback_outbox_6  PARTITION OF hopback_outbox FOR VALUES IN (6);
CREATE TABLE hopback_outbox_7  PARTITION OF hopback_outbox FOR VALUES IN (7);
CREATE TABLE hopback_outbox_8  PARTITION OF hopback_outbox FOR VALUES IN (8);
CREATE TABLE hopback_outbox_9  PARTITION OF hopback_outbox FOR VALUES IN (9);
CREATE TABLE hopback_outbox_10 PARTITION OF hopback_outbox FOR VALUES IN (10);
CREATE TABLE hopback_outbox_11 PARTITION OF hopback_outbox FOR VALUES IN (11);
CREATE TABLE hopback_outbox_12 PARTITION OF hopback_outbox FOR VALUES IN (12);
CREATE TABLE hopback_outbox_13 PARTITION OF hopback_outbox FOR VALUES IN (13);
CREATE TABLE hopback_outbox_14 PARTITION OF hopback_outbox FOR VALUES IN (14);
CREATE TABLE hopback_outbox_15 PARTITION OF hopback_outbox FOR VALUES IN (15);

-- Messages that couldn't be published. Nothing reads this table by itself.
CREATE TABLE hopback_outbox_set_aside (
	id           bigint      PRIMARY KEY,
	message      bytea       NOT NULL,
	message_id   text        NOT NULL,
	address      text        NOT NULL,
	key          text,
	created_at   timestamptz NOT NULL,
	failed_since timestamptz NOT NULL,
	set_aside_at timestamptz NOT NULL DEFAULT clock_timestamp(),
	reason       text        NOT NULL
);
