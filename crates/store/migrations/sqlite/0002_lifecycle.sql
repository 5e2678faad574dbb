-- Pausing, labels, capacity, and events that can be followed.
--
-- Events are written by triggers: a change of state and its event are then one statement, hence one transaction and one
-- trip to the connection, which is what a create costs here.

ALTER TABLE sandboxes ADD COLUMN labels TEXT NOT NULL DEFAULT '{}';
-- The node that it was given to.
ALTER TABLE sandboxes ADD COLUMN node_id TEXT NOT NULL DEFAULT '';
ALTER TABLE sandboxes ADD COLUMN wake_on_traffic BIGINT NOT NULL DEFAULT 0;
-- Paused after so many seconds without work; never if null.
ALTER TABLE sandboxes ADD COLUMN idle_pause_seconds BIGINT;
-- When the state changed last and what is to be said of it: what the triggers below write down.
ALTER TABLE sandboxes ADD COLUMN changed_at BIGINT NOT NULL DEFAULT 0;
ALTER TABLE sandboxes ADD COLUMN change_detail TEXT NOT NULL DEFAULT '';

-- What a key may do beyond its project's sandboxes. Keys of before could do everything there was.
ALTER TABLE api_keys ADD COLUMN role TEXT NOT NULL DEFAULT 'admin';

-- What each node has room for; null where it names no bound.
CREATE TABLE nodes (
    id             TEXT PRIMARY KEY,
    max_sandboxes  BIGINT NOT NULL,
    max_memory_mib BIGINT
);

-- Both are read with every create and answer it alone, without a look into the table.
DROP INDEX sandboxes_live;
CREATE INDEX sandboxes_live ON sandboxes (project_id, vcpus, memory_mib) WHERE state <> 'ended';
CREATE INDEX sandboxes_on_node ON sandboxes (node_id, memory_mib) WHERE state <> 'ended';

ALTER TABLE events ADD COLUMN project_id TEXT NOT NULL DEFAULT '';
UPDATE events SET project_id = COALESCE((SELECT project_id FROM sandboxes WHERE sandboxes.id = sandbox_id), '');
CREATE INDEX events_by_project ON events (project_id, id);

CREATE TRIGGER sandbox_created AFTER INSERT ON sandboxes BEGIN
    INSERT INTO events (sandbox_id, project_id, at, kind, detail)
    VALUES (NEW.id, NEW.project_id, NEW.started_at, NEW.state, NEW.change_detail);
END;

CREATE TRIGGER sandbox_changed AFTER UPDATE OF state ON sandboxes WHEN NEW.state <> OLD.state BEGIN
    INSERT INTO events (sandbox_id, project_id, at, kind, detail)
    VALUES (NEW.id, NEW.project_id, NEW.changed_at,
            CASE WHEN OLD.state = 'paused' AND NEW.state = 'running' THEN 'resumed' ELSE NEW.state END,
            NEW.change_detail);
END;

-- The answer of a create is there to be given again from the moment it runs.
CREATE TRIGGER create_completed AFTER UPDATE OF state ON sandboxes WHEN OLD.state = 'creating' AND NEW.state = 'running' BEGIN
    UPDATE idempotency_keys SET state = 'done' WHERE sandbox_id = NEW.id;
END;

-- Written through by a sync of the log itself, which needs no row to change.
DROP TABLE flushes;
