-- The positions of stream consumers: the offset that comes next. Earlier versions created
-- the table without a record in hopback_migrations.
CREATE TABLE IF NOT EXISTS hopback_stream_offset (
	consumer   text        NOT NULL,
	stream     text        NOT NULL,
	next       bigint      NOT NULL CHECK (next >= 0),
	updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
	PRIMARY KEY (consumer, stream)
);
