-- The inbox: the keys of messages that were handled. Earlier versions created the table
-- without a record in hopback_migrations.
CREATE TABLE IF NOT EXISTS hopback_inbox (
	key        bytea       PRIMARY KEY,
	handled_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX IF NOT EXISTS hopback_inbox_handled_at ON hopback_inbox (handled_at);
