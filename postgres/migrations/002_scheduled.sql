-- Messages for later. They wait apart from the others: a message that waits in hopback_outbox
-- for months would keep a segment from being truncated.
CREATE TABLE hopback_outbox_scheduled (
	id         bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	due_at     timestamptz NOT NULL,
	message    bytea       NOT NULL,  -- in AMQP 1.0's encoding; emptied when ended
	message_id text        NOT NULL UNIQUE,
	address    text        NOT NULL,
	key        text,
	created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
	ended      text CHECK (ended IN ('published', 'cancelled')),
	ended_at   timestamptz            -- the row is deleted 7 days later
);

-- A relay looks at the first entry alone, however many messages wait.
CREATE INDEX hopback_outbox_scheduled_due ON hopback_outbox_scheduled (due_at, id) WHERE ended IS NULL;
CREATE INDEX hopback_outbox_scheduled_ended ON hopback_outbox_scheduled (ended_at) WHERE ended IS NOT NULL;
