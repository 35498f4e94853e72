-- The lease of the relay that keeps the order of keys. Each leader has an epoch, settles only
-- while it is the current one, and counts beat up while it works.
CREATE TABLE hopback_outbox_lease (
	epoch bigint  PRIMARY KEY,
	beat  bigint  NOT NULL DEFAULT 0,
	one   boolean NOT NULL DEFAULT true UNIQUE CHECK (one)
);
INSERT INTO hopback_outbox_lease (epoch) VALUES (0);

-- Two messages can be set aside with the same id: the sequence may have been reset, after a
-- backup was restored for instance.
ALTER TABLE hopback_outbox_set_aside DROP CONSTRAINT hopback_outbox_set_aside_pkey;
ALTER TABLE hopback_outbox_set_aside ADD COLUMN number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY;
CREATE INDEX hopback_outbox_set_aside_id ON hopback_outbox_set_aside (id);
