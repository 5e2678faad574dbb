-- Times are microseconds since 1970. Ids are text in their own form. Booleans are 0 or 1.
-- The statements of the store use $1 placeholders and no SQLite-only functions; only this directory is per database.

CREATE TABLE projects (
    id                  TEXT PRIMARY KEY,
    name                TEXT NOT NULL UNIQUE,
    max_sandboxes       BIGINT NOT NULL,
    max_vcpus           BIGINT NOT NULL,
    max_memory_mib      BIGINT NOT NULL,
    max_timeout_seconds BIGINT NOT NULL,
    created_at          BIGINT NOT NULL
);

CREATE TABLE api_keys (
    id         TEXT PRIMARY KEY,
    project_id TEXT NOT NULL REFERENCES projects (id),
    name       TEXT NOT NULL,
    shown      TEXT NOT NULL,
    hash       TEXT NOT NULL UNIQUE,
    created_at BIGINT NOT NULL,
    revoked_at BIGINT
);
CREATE INDEX api_keys_by_project ON api_keys (project_id, created_at);

-- Environment values are never stored. The access token is stored as it is, because connect must hand it out again;
-- the database file is readable by its owner only.
CREATE TABLE sandboxes (
    id                TEXT PRIMARY KEY,
    project_id        TEXT NOT NULL REFERENCES projects (id),
    template          TEXT NOT NULL,
    template_digest   TEXT NOT NULL,
    vcpus             BIGINT NOT NULL,
    memory_mib        BIGINT NOT NULL,
    disk_mib          BIGINT NOT NULL,
    generation        BIGINT NOT NULL,
    state             TEXT NOT NULL,
    metadata          TEXT NOT NULL,
    access_token      TEXT,
    traffic_token     TEXT,
    mask_request_host TEXT,
    started_at        BIGINT NOT NULL,
    deadline          BIGINT NOT NULL,
    ended_at          BIGINT,
    end_cause         TEXT,
    ready_ms          DOUBLE PRECISION,
    cpu_micros        BIGINT
);
CREATE INDEX sandboxes_by_project ON sandboxes (project_id, started_at, id);
CREATE INDEX sandboxes_live ON sandboxes (project_id, state) WHERE state <> 'ended';
CREATE INDEX sandboxes_ended ON sandboxes (ended_at) WHERE state = 'ended';

CREATE TABLE idempotency_keys (
    project_id   TEXT NOT NULL REFERENCES projects (id),
    key          TEXT NOT NULL,
    request_hash TEXT NOT NULL,
    state        TEXT NOT NULL,
    sandbox_id   TEXT NOT NULL,
    expires_at   BIGINT NOT NULL,
    PRIMARY KEY (project_id, key)
);
CREATE INDEX idempotency_keys_by_sandbox ON idempotency_keys (sandbox_id);

CREATE TABLE events (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    sandbox_id TEXT NOT NULL,
    at         BIGINT NOT NULL,
    kind       TEXT NOT NULL,
    detail     TEXT NOT NULL
);
CREATE INDEX events_by_sandbox ON events (sandbox_id, id);

-- Written by nothing but a flush, which needs a row to change.
CREATE TABLE flushes (
    id    INTEGER PRIMARY KEY,
    count BIGINT NOT NULL
);
INSERT INTO flushes (id, count) VALUES (1, 0);
