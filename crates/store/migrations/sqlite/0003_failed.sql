-- Creates that failed are forgotten sooner than other ends; this finds them without reading those.
CREATE INDEX sandboxes_failed ON sandboxes (ended_at)
    WHERE state = 'ended' AND end_cause >= '{"kind":"create_failed"' AND end_cause < '{"kind":"create_failee"';
