-- Marks of the last handled messages. They show that a stream was deleted and declared again, so
-- that a position belongs to another one.
ALTER TABLE hopback_stream_offset ADD COLUMN IF NOT EXISTS mark text NOT NULL DEFAULT '';
