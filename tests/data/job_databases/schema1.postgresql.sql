SET statement_timeout = 0;
SET lock_timeout = 0;
SET idle_in_transaction_session_timeout = 0;
SET client_encoding = 'UTF8';
SET standard_conforming_strings = on;
SELECT pg_catalog.set_config('search_path', '', false);
SET check_function_bodies = false;
SET xmloption = content;
SET client_min_messages = warning;
SET row_security = off;
SET default_tablespace = '';
SET default_table_access_method = heap;
CREATE TABLE public.audit_log (
    id bigint NOT NULL,
    at double precision NOT NULL,
    tenant character varying(64) NOT NULL,
    actor character varying(200) NOT NULL,
    address character varying(64) NOT NULL,
    action character varying(64) NOT NULL,
    object character varying(200) NOT NULL,
    outcome character varying(64) NOT NULL
);
CREATE SEQUENCE public.audit_log_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.audit_log_id_seq OWNED BY public.audit_log.id;
CREATE TABLE public.idempotency_keys (
    tenant character varying(64) DEFAULT 'default'::character varying NOT NULL,
    key character varying(255) NOT NULL,
    fingerprint character varying(64) NOT NULL,
    holder character varying(64) NOT NULL,
    held_until double precision NOT NULL,
    job_id character varying(40)
);
CREATE TABLE public.job_events (
    job_id character varying(40) NOT NULL,
    seq integer NOT NULL,
    at double precision NOT NULL,
    kind character varying(16) NOT NULL,
    state character varying(16) NOT NULL,
    progress text,
    worker text
);
CREATE TABLE public.job_labels (
    job_id character varying(40) NOT NULL,
    name character varying(128) NOT NULL,
    value character varying(512) NOT NULL
);
CREATE TABLE public.job_plans (
    job_id character varying(40) NOT NULL,
    digest character varying(128) NOT NULL
);
CREATE TABLE public.job_refusals (
    job_id character varying(40) NOT NULL,
    worker character varying(200) NOT NULL,
    code character varying(64) NOT NULL,
    at double precision NOT NULL
);
CREATE TABLE public.job_workers (
    job_id character varying(40) NOT NULL,
    token character varying(64) NOT NULL,
    worker character varying(200) NOT NULL,
    role character varying(16) NOT NULL,
    attempt integer NOT NULL,
    joined_at double precision NOT NULL,
    lease_until double precision,
    left_at double precision,
    failed integer NOT NULL,
    runs integer,
    takeovers integer,
    splits integer,
    epochs_lost integer,
    units integer,
    write_bytes bigint
);
CREATE TABLE public.jobs (
    id character varying(40) NOT NULL,
    kind character varying(16) NOT NULL,
    state character varying(16) NOT NULL,
    request text NOT NULL,
    target text NOT NULL,
    attempt integer NOT NULL,
    max_attempts integer NOT NULL,
    releases integer NOT NULL,
    owner character varying(64),
    worker character varying(200),
    lease_until double precision,
    not_before double precision NOT NULL,
    rung_at double precision NOT NULL,
    cancel_requested integer NOT NULL,
    progress text,
    plan_digest character varying(128),
    error text,
    result text,
    last_seq integer NOT NULL,
    created_at double precision NOT NULL,
    started_at double precision,
    finished_at double precision,
    priority integer DEFAULT 0 NOT NULL,
    max_workers integer DEFAULT 0 NOT NULL,
    takes_workers integer DEFAULT 0 NOT NULL,
    retries integer DEFAULT 0 NOT NULL,
    discard_at double precision,
    discard_asked integer DEFAULT 0 NOT NULL,
    discard_tries integer DEFAULT 0 NOT NULL,
    tenant character varying(64) DEFAULT 'default'::character varying NOT NULL,
    given_id character varying(40),
    planned_bytes bigint DEFAULT '0'::bigint NOT NULL,
    traceparent character varying(55),
    checked integer DEFAULT 0 NOT NULL,
    source text,
    brief text
);
CREATE TABLE public.reshard_meta (
    name character varying(64) NOT NULL,
    value text NOT NULL
);
CREATE TABLE public.reshard_revision (
    version_num character varying(32) NOT NULL
);
CREATE TABLE public.tenants (
    name character varying(64) NOT NULL,
    created_at double precision NOT NULL,
    read_roots text,
    write_roots text,
    profiles text,
    max_queued integer,
    max_running integer,
    max_workers integer,
    max_priority integer,
    bytes_per_day bigint,
    weight integer DEFAULT 1 NOT NULL
);
CREATE TABLE public.tokens (
    id character varying(32) NOT NULL,
    tenant character varying(64) NOT NULL,
    name character varying(200) NOT NULL,
    scopes character varying(200) NOT NULL,
    token_hash character varying(64) NOT NULL,
    session_hash character varying(64) NOT NULL,
    created_at double precision NOT NULL,
    created_by character varying(200) NOT NULL,
    expires_at double precision,
    revoked_at double precision,
    last_used_at double precision
);
CREATE TABLE public.totals (
    name character varying(64) NOT NULL,
    label character varying(64) NOT NULL,
    value bigint NOT NULL
);
CREATE TABLE public.webhook_deliveries (
    id character varying(40) NOT NULL,
    webhook_id character varying(40) NOT NULL,
    job_id character varying(40) NOT NULL,
    event character varying(32) NOT NULL,
    payload text NOT NULL,
    state character varying(16) NOT NULL,
    tries integer NOT NULL,
    created_at double precision NOT NULL,
    next_at double precision NOT NULL,
    owner character varying(64),
    lease_until double precision,
    ended_at double precision,
    last_status integer,
    last_error text
);
CREATE TABLE public.webhooks (
    id character varying(40) NOT NULL,
    tenant character varying(64) DEFAULT 'default'::character varying NOT NULL,
    url text NOT NULL,
    events character varying(200) NOT NULL,
    description character varying(200) NOT NULL,
    secret text NOT NULL,
    previous_secret text,
    previous_until double precision,
    created_at double precision NOT NULL,
    disabled_at double precision
);
CREATE TABLE public.workers (
    name character varying(200) NOT NULL,
    started_at double precision NOT NULL,
    seen_at double precision NOT NULL,
    good_at double precision NOT NULL,
    quarantined_until double precision NOT NULL,
    quarantines integer NOT NULL,
    problem text,
    engine_peak_bytes bigint DEFAULT '0'::bigint NOT NULL
);
ALTER TABLE ONLY public.audit_log ALTER COLUMN id SET DEFAULT nextval('public.audit_log_id_seq'::regclass);
INSERT INTO public.idempotency_keys VALUES ('default', 'a-key', 'ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff', 'ea491971949012eba5986c945b364618', 1795641320.910907, 'job_uqfpzbel2uhh7k5fejkntrdw');
INSERT INTO public.idempotency_keys VALUES ('default', 'a-held-key', 'eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee', 'd45efe88972db56ea1416f361b6329a8', 1795641321.152124, NULL);
INSERT INTO public.job_events VALUES ('job_kx7zf2mtjs6fxwge3bqumky2', 1, 1795641290.867993, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_uqfpzbel2uhh7k5fejkntrdw', 1, 1795641290.936944, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_jm7dmcefnbyu3eehes3fkeul', 1, 1795641291.177996, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_jm7dmcefnbyu3eehes3fkeul', 2, 1795641291.269423, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_jm7dmcefnbyu3eehes3fkeul', 3, 1795641291.348065, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_jm7dmcefnbyu3eehes3fkeul', 4, 1795641291.377266, 'state', 'QUEUED', '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_qirwbn2wozdlk5xe3ix26vdv', 1, 1795641291.406371, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_qirwbn2wozdlk5xe3ix26vdv', 2, 1795641291.449287, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_qirwbn2wozdlk5xe3ix26vdv', 3, 1795641291.515442, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_qirwbn2wozdlk5xe3ix26vdv', 4, 1795641291.542737, 'state', 'QUEUED', '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_5gid7sl2dubi3qlja3vi6fqk', 1, 1795641291.566053, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_5gid7sl2dubi3qlja3vi6fqk', 2, 1795641291.605249, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_hht3mwhvxkrv4pyl4roebwlf', 1, 1795641291.641895, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_hht3mwhvxkrv4pyl4roebwlf', 2, 1795641291.682149, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_hht3mwhvxkrv4pyl4roebwlf', 3, 1795641291.751005, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_ryjhso5ifcf4a2m2phjcezxc', 1, 1795641291.774351, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_ryjhso5ifcf4a2m2phjcezxc', 2, 1795641291.827261, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_ryjhso5ifcf4a2m2phjcezxc', 3, 1795641291.869251, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_ryjhso5ifcf4a2m2phjcezxc', 4, 1795641291.892333, 'state', 'VERIFYING', '{"phase":"verifying","bytes_done":2,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":false}', NULL);
INSERT INTO public.job_events VALUES ('job_vg6baktf735vdd4g4fmbid5u', 1, 1795641291.913749, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_vg6baktf735vdd4g4fmbid5u', 2, 1795641291.950106, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_vg6baktf735vdd4g4fmbid5u', 3, 1795641292.003622, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_vg6baktf735vdd4g4fmbid5u', 4, 1795641292.016524, 'state', 'VERIFYING', '{"phase":"verifying","bytes_done":2,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":false}', NULL);
INSERT INTO public.job_events VALUES ('job_vg6baktf735vdd4g4fmbid5u', 5, 1795641292.046276, 'state', 'SUCCEEDED', '{"phase":"verifying","bytes_done":2,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":false}', NULL);
INSERT INTO public.job_events VALUES ('job_4zpm6dmn7fgfhq2nx6ict5j2', 1, 1795641292.058633, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_4zpm6dmn7fgfhq2nx6ict5j2', 2, 1795641292.090133, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_4zpm6dmn7fgfhq2nx6ict5j2', 3, 1795641292.128146, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_4zpm6dmn7fgfhq2nx6ict5j2', 4, 1795641292.141879, 'state', 'FAILED', '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_rqdyhgsbozhdamorjzcp5xpp', 1, 1795641292.150083, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_rqdyhgsbozhdamorjzcp5xpp', 2, 1795641292.171921, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_rqdyhgsbozhdamorjzcp5xpp', 3, 1795641292.195487, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_rqdyhgsbozhdamorjzcp5xpp', 4, 1795641292.207819, 'state', 'FAILED', '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_m6kbhaymjhrgqgoxeenfhyk5', 1, 1795641292.218398, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_m6kbhaymjhrgqgoxeenfhyk5', 2, 1795641292.238844, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_m6kbhaymjhrgqgoxeenfhyk5', 3, 1795641292.253951, 'state', 'FAILED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_xn2msbkouewjota33rhwbbwz', 1, 1795641292.262432, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_xn2msbkouewjota33rhwbbwz', 2, 1795641292.294017, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_xn2msbkouewjota33rhwbbwz', 3, 1795641292.331599, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_xn2msbkouewjota33rhwbbwz', 4, 1795641292.350289, 'state', 'FAILED', '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_fg2opufujkll55sdta7kc7ep', 1, 1795641292.370874, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_fg2opufujkll55sdta7kc7ep', 2, 1795641292.39802, 'state', 'CANCELLED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_j3zuymdqx2vlbve23hwt5z7h', 1, 1795641292.430212, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_j3zuymdqx2vlbve23hwt5z7h', 2, 1795641292.45807, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_j3zuymdqx2vlbve23hwt5z7h', 3, 1795641292.483374, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_j3zuymdqx2vlbve23hwt5z7h', 4, 1795641292.517264, 'state', 'CANCELLING', '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_j3zuymdqx2vlbve23hwt5z7h', 5, 1795641292.53728, 'state', 'CANCELLED', '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_x4zj2loeqo5o7a2efa3xzfnx', 1, 1795641292.549094, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_x4zj2loeqo5o7a2efa3xzfnx', 2, 1795641292.578802, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_x4zj2loeqo5o7a2efa3xzfnx', 3, 1795641292.601537, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_x4zj2loeqo5o7a2efa3xzfnx', 4, 1795641292.62139, 'state', 'CANCELLING', '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_cjilmihtvzse2zz2tto24at3', 1, 1795641292.637719, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_n2c5fy5x5sxqq7pkw7gsu52n', 1, 1795641292.676521, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_crossgxiutfvho3jmt4di4vp', 1, 1795641292.693252, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_crossgxiutfvho3jmt4di4vp', 2, 1795641292.723127, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_crossgxiutfvho3jmt4di4vp', 3, 1795641292.754773, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_crossgxiutfvho3jmt4di4vp', 4, 1795641292.834397, 'worker', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', '{"worker":"helper-1","role":"helper","attempt":1,"joined_at":"2026-11-25T21:14:52.819610Z","left_at":null,"share":null}');
INSERT INTO public.job_events VALUES ('job_crossgxiutfvho3jmt4di4vp', 5, 1795641292.871254, 'worker', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', '{"worker":"helper-2","role":"helper","attempt":1,"joined_at":"2026-11-25T21:14:52.866549Z","left_at":null,"share":null}');
INSERT INTO public.job_events VALUES ('job_crossgxiutfvho3jmt4di4vp', 6, 1795641292.92028, 'worker', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', '{"worker":"helper-1","role":"helper","attempt":1,"joined_at":"2026-11-25T21:14:52.819610Z","left_at":"2026-11-25T21:14:52.917781Z","share":{"runs":2,"takeovers":0,"splits":0,"epochs_lost":0,"units":5,"write_bytes":99}}');
INSERT INTO public.job_events VALUES ('job_2f2qj3oc4eei7uxllf3m7guv', 1, 1795641292.982363, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_2f2qj3oc4eei7uxllf3m7guv', 2, 1795641293.010161, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_2f2qj3oc4eei7uxllf3m7guv', 3, 1795641293.048427, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_2f2qj3oc4eei7uxllf3m7guv', 4, 1795641293.084609, 'state', 'QUEUED', '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_ucsnftc52ig7v4ki73fkaxac', 1, 1795641293.128277, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_ucsnftc52ig7v4ki73fkaxac', 2, 1795641293.158837, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_ucsnftc52ig7v4ki73fkaxac', 3, 1795641293.191002, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_ucsnftc52ig7v4ki73fkaxac', 4, 1795641293.21003, 'state', 'FAILED', '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_ucsnftc52ig7v4ki73fkaxac', 5, 1795641293.234973, 'state', 'QUEUED', '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_labels VALUES ('job_kx7zf2mtjs6fxwge3bqumky2', 'case', 'queued');
INSERT INTO public.job_labels VALUES ('job_kx7zf2mtjs6fxwge3bqumky2', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_uqfpzbel2uhh7k5fejkntrdw', 'case', 'with-a-key');
INSERT INTO public.job_labels VALUES ('job_uqfpzbel2uhh7k5fejkntrdw', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_jm7dmcefnbyu3eehes3fkeul', 'case', 'released');
INSERT INTO public.job_labels VALUES ('job_jm7dmcefnbyu3eehes3fkeul', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_qirwbn2wozdlk5xe3ix26vdv', 'case', 'to-be-tried-again');
INSERT INTO public.job_labels VALUES ('job_qirwbn2wozdlk5xe3ix26vdv', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_5gid7sl2dubi3qlja3vi6fqk', 'case', 'planning');
INSERT INTO public.job_labels VALUES ('job_5gid7sl2dubi3qlja3vi6fqk', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_hht3mwhvxkrv4pyl4roebwlf', 'case', 'running');
INSERT INTO public.job_labels VALUES ('job_hht3mwhvxkrv4pyl4roebwlf', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_ryjhso5ifcf4a2m2phjcezxc', 'case', 'verifying');
INSERT INTO public.job_labels VALUES ('job_ryjhso5ifcf4a2m2phjcezxc', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_vg6baktf735vdd4g4fmbid5u', 'case', 'succeeded');
INSERT INTO public.job_labels VALUES ('job_vg6baktf735vdd4g4fmbid5u', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_4zpm6dmn7fgfhq2nx6ict5j2', 'case', 'failed');
INSERT INTO public.job_labels VALUES ('job_4zpm6dmn7fgfhq2nx6ict5j2', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_rqdyhgsbozhdamorjzcp5xpp', 'case', 'failed-and-unwanted');
INSERT INTO public.job_labels VALUES ('job_rqdyhgsbozhdamorjzcp5xpp', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_m6kbhaymjhrgqgoxeenfhyk5', 'case', 'failed-at-once');
INSERT INTO public.job_labels VALUES ('job_m6kbhaymjhrgqgoxeenfhyk5', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_xn2msbkouewjota33rhwbbwz', 'case', 'exhausted');
INSERT INTO public.job_labels VALUES ('job_xn2msbkouewjota33rhwbbwz', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_fg2opufujkll55sdta7kc7ep', 'case', 'cancelled-before');
INSERT INTO public.job_labels VALUES ('job_fg2opufujkll55sdta7kc7ep', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_j3zuymdqx2vlbve23hwt5z7h', 'case', 'cancelled');
INSERT INTO public.job_labels VALUES ('job_j3zuymdqx2vlbve23hwt5z7h', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_x4zj2loeqo5o7a2efa3xzfnx', 'case', 'cancelling');
INSERT INTO public.job_labels VALUES ('job_x4zj2loeqo5o7a2efa3xzfnx', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_cjilmihtvzse2zz2tto24at3', 'case', 'a-plan');
INSERT INTO public.job_labels VALUES ('job_cjilmihtvzse2zz2tto24at3', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_n2c5fy5x5sxqq7pkw7gsu52n', 'case', 'planned');
INSERT INTO public.job_labels VALUES ('job_crossgxiutfvho3jmt4di4vp', 'case', 'shared');
INSERT INTO public.job_labels VALUES ('job_crossgxiutfvho3jmt4di4vp', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_2f2qj3oc4eei7uxllf3m7guv', 'case', 'refused');
INSERT INTO public.job_labels VALUES ('job_2f2qj3oc4eei7uxllf3m7guv', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_ucsnftc52ig7v4ki73fkaxac', 'case', 'retried');
INSERT INTO public.job_labels VALUES ('job_ucsnftc52ig7v4ki73fkaxac', 'team', 'x');
INSERT INTO public.job_plans VALUES ('job_jm7dmcefnbyu3eehes3fkeul', 'plan-of-released');
INSERT INTO public.job_plans VALUES ('job_qirwbn2wozdlk5xe3ix26vdv', 'plan-of-to-be-tried-again');
INSERT INTO public.job_plans VALUES ('job_hht3mwhvxkrv4pyl4roebwlf', 'plan-of-running');
INSERT INTO public.job_plans VALUES ('job_ryjhso5ifcf4a2m2phjcezxc', 'plan-of-verifying');
INSERT INTO public.job_plans VALUES ('job_4zpm6dmn7fgfhq2nx6ict5j2', 'plan-of-failed');
INSERT INTO public.job_plans VALUES ('job_rqdyhgsbozhdamorjzcp5xpp', 'plan-of-failed-and-unwanted');
INSERT INTO public.job_plans VALUES ('job_xn2msbkouewjota33rhwbbwz', 'plan-of-exhausted');
INSERT INTO public.job_plans VALUES ('job_x4zj2loeqo5o7a2efa3xzfnx', 'plan-of-cancelling');
INSERT INTO public.job_plans VALUES ('job_crossgxiutfvho3jmt4di4vp', 'plan-of-shared');
INSERT INTO public.job_plans VALUES ('job_2f2qj3oc4eei7uxllf3m7guv', 'plan-of-refused');
INSERT INTO public.job_plans VALUES ('job_ucsnftc52ig7v4ki73fkaxac', 'plan-of-retried');
INSERT INTO public.job_refusals VALUES ('job_2f2qj3oc4eei7uxllf3m7guv', 'old-worker', 'storage.unavailable', 1795641293.062697);
INSERT INTO public.job_workers VALUES ('job_jm7dmcefnbyu3eehes3fkeul', 'ae67fed8733543f00e5af401e1b06bd8', 'old-worker', 'owner', 1, 1795641291.278649, NULL, 1795641291.378844, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_qirwbn2wozdlk5xe3ix26vdv', '87d575657be9610494113fc11706accc', 'old-worker', 'owner', 1, 1795641291.458764, NULL, 1795641291.54361, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_5gid7sl2dubi3qlja3vi6fqk', '9d42d4e422143534306cff7fc9888972', 'old-worker', 'owner', 1, 1795641291.614602, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_hht3mwhvxkrv4pyl4roebwlf', '8b00fa712c17399f273ca88cf5536221', 'old-worker', 'owner', 1, 1795641291.691036, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_ryjhso5ifcf4a2m2phjcezxc', '15750d605a43ec4ee869988382fd0cca', 'old-worker', 'owner', 1, 1795641291.83344, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_vg6baktf735vdd4g4fmbid5u', '8632d54bfc1a2e1fef2b1755d2a3740d', 'old-worker', 'owner', 1, 1795641291.954372, NULL, 1795641292.047759, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_4zpm6dmn7fgfhq2nx6ict5j2', 'fedcafb7de234a730bb8c0f841e0a484', 'old-worker', 'owner', 1, 1795641292.09379, NULL, 1795641292.142527, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_rqdyhgsbozhdamorjzcp5xpp', '01cbf5f5c3c32b872b24ee52fe646ffc', 'old-worker', 'owner', 1, 1795641292.177878, NULL, 1795641292.208464, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_m6kbhaymjhrgqgoxeenfhyk5', 'df752b4276fd70ec96051ca66f3cdac2', 'old-worker', 'owner', 1, 1795641292.239953, NULL, 1795641292.255035, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_xn2msbkouewjota33rhwbbwz', '4fb2f2fbc47375d692ec54509a813277', 'old-worker', 'owner', 1, 1795641292.298724, NULL, 1795641292.353931, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_j3zuymdqx2vlbve23hwt5z7h', '0ae98835bbc4fa8ba951d2859f771448', 'old-worker', 'owner', 1, 1795641292.461769, NULL, 1795641292.538695, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_x4zj2loeqo5o7a2efa3xzfnx', '84ed6385290ac215b88b3587047a8697', 'old-worker', 'owner', 1, 1795641292.579769, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_crossgxiutfvho3jmt4di4vp', '0dc4022740a42910516c2fad8fb9ec92', 'old-worker', 'owner', 1, 1795641292.730505, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_crossgxiutfvho3jmt4di4vp', '4ac4867c8a2f06477e867e382be770ef', 'helper-2', 'helper', 1, 1795641292.866549, 1795641352.866556, NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_crossgxiutfvho3jmt4di4vp', '75e42b313032d67154ccad4c6dae42ab', 'helper-1', 'helper', 1, 1795641292.81961, 1795641352.819616, 1795641292.917781, 0, 2, 0, 0, 0, 5, 99);
INSERT INTO public.job_workers VALUES ('job_2f2qj3oc4eei7uxllf3m7guv', 'bbbfa0093b43080b7e81464b0121b6a4', 'old-worker', 'owner', 1, 1795641293.014047, NULL, 1795641293.093449, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_ucsnftc52ig7v4ki73fkaxac', 'ace6df9867029bcca4b1b4ba8163932f', 'old-worker', 'owner', 1, 1795641293.15992, NULL, 1795641293.214208, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.jobs VALUES ('job_kx7zf2mtjs6fxwge3bqumky2', 'convert', 'QUEUED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/queued","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}', '/frozen/queued', 0, 3, 0, NULL, NULL, NULL, 0, 0, 0, NULL, NULL, NULL, NULL, 1, 1795641290.855545, NULL, NULL, 0, 0, 0, 0, NULL, 0, 0, 'default', NULL, 0, NULL, 0, '/frozen/source', NULL);
INSERT INTO public.jobs VALUES ('job_uqfpzbel2uhh7k5fejkntrdw', 'convert', 'QUEUED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/with-a-key","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}', '/frozen/with-a-key', 0, 3, 0, NULL, NULL, NULL, 0, 0, 0, NULL, NULL, NULL, NULL, 1, 1795641290.935314, NULL, NULL, 0, 0, 0, 0, NULL, 0, 0, 'default', NULL, 0, NULL, 0, '/frozen/source', NULL);
INSERT INTO public.jobs VALUES ('job_jm7dmcefnbyu3eehes3fkeul', 'convert', 'QUEUED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/released","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}', '/frozen/released', 1, 3, 1, NULL, NULL, NULL, 0, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', 'plan-of-released', NULL, NULL, 4, 1795641291.176352, 1795641291.255241, NULL, 0, 0, 1, 0, NULL, 0, 0, 'default', NULL, 0, NULL, 1, '/frozen/source', NULL);
INSERT INTO public.jobs VALUES ('job_5gid7sl2dubi3qlja3vi6fqk', 'convert', 'PLANNING', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/planning","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}', '/frozen/planning', 1, 3, 0, '9d42d4e422143534306cff7fc9888972', 'old-worker', 1795641351.599155, 0, 0, 0, NULL, NULL, NULL, NULL, 2, 1795641291.563213, 1795641291.599156, NULL, 0, 0, 0, 0, NULL, 0, 0, 'default', NULL, 0, NULL, 0, '/frozen/source', NULL);
INSERT INTO public.jobs VALUES ('job_qirwbn2wozdlk5xe3ix26vdv', 'convert', 'QUEUED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/to-be-tried-again","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}', '/frozen/to-be-tried-again', 1, 3, 0, NULL, NULL, NULL, 1795641291.547707, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', 'plan-of-to-be-tried-again', '{"type":"urn:reshard:error:storage.unavailable","title":"The store timed out or throttled.","status":503,"detail":"the store did not answer","code":"storage.unavailable","fix":"look at the store","retryable":true,"details":{}}', NULL, 4, 1795641291.399689, 1795641291.444579, NULL, 0, 0, 1, 0, NULL, 0, 0, 'default', NULL, 0, NULL, 1, '/frozen/source', NULL);
INSERT INTO public.jobs VALUES ('job_hht3mwhvxkrv4pyl4roebwlf', 'convert', 'RUNNING', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/running","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}', '/frozen/running', 1, 3, 0, '8b00fa712c17399f273ca88cf5536221', 'old-worker', 1795641351.749814, 0, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', 'plan-of-running', NULL, NULL, 3, 1795641291.632922, 1795641291.678381, NULL, 0, 0, 1, 0, NULL, 0, 0, 'default', NULL, 0, NULL, 1, '/frozen/source', NULL);
INSERT INTO public.jobs VALUES ('job_ryjhso5ifcf4a2m2phjcezxc', 'convert', 'VERIFYING', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/verifying","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}', '/frozen/verifying', 1, 3, 0, '15750d605a43ec4ee869988382fd0cca', 'old-worker', 1795641351.886823, 0, 0, 0, '{"phase":"verifying","bytes_done":2,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":false}', 'plan-of-verifying', NULL, NULL, 4, 1795641291.764285, 1795641291.818782, NULL, 0, 0, 0, 0, NULL, 0, 0, 'default', NULL, 0, NULL, 1, '/frozen/source', NULL);
INSERT INTO public.jobs VALUES ('job_vg6baktf735vdd4g4fmbid5u', 'convert', 'SUCCEEDED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/succeeded","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}', '/frozen/succeeded', 1, 3, 0, '8632d54bfc1a2e1fef2b1755d2a3740d', 'old-worker', NULL, 0, 0, 0, '{"phase":"verifying","bytes_done":2,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":false}', 'd', NULL, '{"schema_version":1,"target":"/frozen/succeeded","to":"universal","files":[],"read_bytes":1,"write_bytes":2,"server_copied_bytes":0,"resumed_bytes":0,"seconds":{},"plan_digest":"d","already_done":false,"verification":"default","warnings":[],"not_carried":[],"casts":[],"share":null}', 5, 1795641291.909286, 1795641291.945914, 1795641292.038023, 0, 0, 0, 0, NULL, 0, 0, 'default', NULL, 0, NULL, 1, '/frozen/source', '{"schema_version":1,"target":"/frozen/succeeded","to":"universal","files":[],"read_bytes":1,"write_bytes":2,"server_copied_bytes":0,"resumed_bytes":0,"seconds":{},"plan_digest":"d","already_done":false,"verification":"default","warnings":[],"not_carried":[],"casts":[],"share":null}');
INSERT INTO public.jobs VALUES ('job_4zpm6dmn7fgfhq2nx6ict5j2', 'convert', 'FAILED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/failed","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}', '/frozen/failed', 1, 3, 0, 'fedcafb7de234a730bb8c0f841e0a484', 'old-worker', NULL, 0, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', 'plan-of-failed', '{"type":"urn:reshard:error:checkpoint.incomplete","title":"Files or parts of tensors are missing.","status":422,"detail":"rank 1 is missing","code":"checkpoint.incomplete","fix":"copy it again","retryable":false,"details":{}}', NULL, 4, 1795641292.054276, 1795641292.077137, 1795641292.137851, 0, 0, 1, 0, 1795727692.137904, 0, 0, 'default', NULL, 0, NULL, 1, '/frozen/source', NULL);
INSERT INTO public.jobs VALUES ('job_rqdyhgsbozhdamorjzcp5xpp', 'convert', 'FAILED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/failed-and-unwanted","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}', '/frozen/failed-and-unwanted', 1, 3, 0, '01cbf5f5c3c32b872b24ee52fe646ffc', 'old-worker', NULL, 0, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', 'plan-of-failed-and-unwanted', '{"type":"urn:reshard:error:checkpoint.incomplete","title":"Files or parts of tensors are missing.","status":422,"detail":"rank 1 is missing","code":"checkpoint.incomplete","fix":"copy it again","retryable":false,"details":{}}', NULL, 4, 1795641292.148936, 1795641292.170442, 1795641292.205876, 0, 0, 1, 0, 1795727692.205904, 0, 0, 'default', NULL, 0, NULL, 1, '/frozen/source', NULL);
INSERT INTO public.jobs VALUES ('job_m6kbhaymjhrgqgoxeenfhyk5', 'convert', 'FAILED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/failed-at-once","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}', '/frozen/failed-at-once', 1, 3, 0, 'df752b4276fd70ec96051ca66f3cdac2', 'old-worker', NULL, 0, 0, 0, NULL, NULL, '{"type":"urn:reshard:error:checkpoint.incomplete","title":"Files or parts of tensors are missing.","status":422,"detail":"rank 1 is missing","code":"checkpoint.incomplete","fix":"copy it again","retryable":false,"details":{}}', NULL, 3, 1795641292.213801, 1795641292.232428, 1795641292.248055, 0, 0, 0, 0, NULL, 0, 0, 'default', NULL, 0, NULL, 0, '/frozen/source', NULL);
INSERT INTO public.jobs VALUES ('job_xn2msbkouewjota33rhwbbwz', 'convert', 'FAILED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/exhausted","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}', '/frozen/exhausted', 1, 1, 0, '4fb2f2fbc47375d692ec54509a813277', 'old-worker', NULL, 0, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', 'plan-of-exhausted', '{"type":"urn:reshard:error:job.attempts_exhausted","title":"The job lost its worker in every allowed attempt.","status":500,"detail":"1 attempts were lost; the last one: the store did not answer","code":"job.attempts_exhausted","fix":"look at the worker''s log for the cause, then submit the job again: finished work is kept","retryable":false,"details":{"attempts":1,"last_error":{"type":"urn:reshard:error:storage.unavailable","title":"The store timed out or throttled.","status":503,"detail":"the store did not answer","code":"storage.unavailable","fix":"look at the store","retryable":true,"details":{}}}}', NULL, 4, 1795641292.259216, 1795641292.285156, 1795641292.348848, 0, 0, 1, 0, 1795727692.348875, 0, 0, 'default', NULL, 0, NULL, 1, '/frozen/source', NULL);
INSERT INTO public.jobs VALUES ('job_fg2opufujkll55sdta7kc7ep', 'convert', 'CANCELLED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/cancelled-before","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}', '/frozen/cancelled-before', 0, 3, 0, NULL, NULL, NULL, 0, 0, 1, NULL, NULL, NULL, NULL, 2, 1795641292.369314, NULL, 1795641292.394287, 0, 0, 0, 0, NULL, 0, 0, 'default', NULL, 0, NULL, 0, '/frozen/source', NULL);
INSERT INTO public.jobs VALUES ('job_j3zuymdqx2vlbve23hwt5z7h', 'convert', 'CANCELLED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/cancelled","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}', '/frozen/cancelled', 1, 3, 0, '0ae98835bbc4fa8ba951d2859f771448', 'old-worker', NULL, 0, 0, 1, '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', 'plan-of-cancelled', NULL, NULL, 5, 1795641292.417767, 1795641292.449087, 1795641292.528123, 0, 0, 1, 0, NULL, 0, 0, 'default', NULL, 0, NULL, 1, '/frozen/source', NULL);
INSERT INTO public.jobs VALUES ('job_cjilmihtvzse2zz2tto24at3', 'convert', 'QUEUED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/a-plan","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}', '/frozen/a-plan', 0, 3, 0, NULL, NULL, NULL, 0, 0, 0, NULL, NULL, NULL, NULL, 1, 1795641292.63409, NULL, NULL, 0, 0, 0, 0, NULL, 0, 0, 'default', NULL, 0, NULL, 0, '/frozen/source', NULL);
INSERT INTO public.jobs VALUES ('job_n2c5fy5x5sxqq7pkw7gsu52n', 'plan', 'QUEUED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/a-plan","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}', '', 0, 3, 0, NULL, NULL, NULL, 0, 0, 0, NULL, NULL, NULL, NULL, 1, 1795641292.663884, NULL, NULL, 0, 0, 0, 0, NULL, 0, 0, 'default', NULL, 0, NULL, 0, '/frozen/source', NULL);
INSERT INTO public.jobs VALUES ('job_x4zj2loeqo5o7a2efa3xzfnx', 'convert', 'CANCELLING', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/cancelling","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}', '/frozen/cancelling', 1, 3, 0, '84ed6385290ac215b88b3587047a8697', 'old-worker', 1795641352.600562, 0, 0, 1, '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', 'plan-of-cancelling', NULL, NULL, 4, 1795641292.547926, 1795641292.568647, NULL, 0, 0, 1, 0, NULL, 0, 0, 'default', NULL, 0, NULL, 1, '/frozen/source', NULL);
INSERT INTO public.jobs VALUES ('job_crossgxiutfvho3jmt4di4vp', 'convert', 'RUNNING', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/shared","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}', '/frozen/shared', 1, 3, 0, '0dc4022740a42910516c2fad8fb9ec92', 'old-worker', 1795641352.754011, 0, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', 'plan-of-shared', NULL, NULL, 6, 1795641292.685299, 1795641292.72151, NULL, 5, 3, 1, 0, NULL, 0, 0, 'default', NULL, 0, NULL, 1, '/frozen/source', NULL);
INSERT INTO public.jobs VALUES ('job_2f2qj3oc4eei7uxllf3m7guv', 'convert', 'QUEUED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/refused","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}', '/frozen/refused', 1, 3, 1, NULL, NULL, NULL, 0, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', 'plan-of-refused', '{"type":"urn:reshard:error:storage.unavailable","title":"The store timed out or throttled.","status":503,"detail":"the store did not answer","code":"storage.unavailable","fix":"look at the store","retryable":true,"details":{}}', NULL, 4, 1795641292.975373, 1795641293.002596, NULL, 0, 0, 1, 0, NULL, 0, 0, 'default', NULL, 0, NULL, 1, '/frozen/source', NULL);
INSERT INTO public.jobs VALUES ('job_ucsnftc52ig7v4ki73fkaxac', 'convert', 'QUEUED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/retried","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}', '/frozen/retried', 1, 3, 1, NULL, NULL, NULL, 0, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', 'plan-of-retried', NULL, NULL, 5, 1795641293.11913, 1795641293.153243, NULL, 0, 0, 1, 1, NULL, 0, 0, 'default', NULL, 0, NULL, 1, '/frozen/source', NULL);
INSERT INTO public.reshard_meta VALUES ('oldest_program', '1');
INSERT INTO public.reshard_revision VALUES ('0001');
INSERT INTO public.tenants VALUES ('default', 1795641290.616158, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1);
INSERT INTO public.workers VALUES ('old-worker', 1795641292.949989, 1795641292.949999, 0, 0, 0, NULL, 0);
INSERT INTO public.workers VALUES ('another-worker', 1795641292.95966, 1795641292.95967, 1795641293.106273, 0, 0, NULL, 0);
SELECT pg_catalog.setval('public.audit_log_id_seq', 1, false);
ALTER TABLE ONLY public.audit_log
    ADD CONSTRAINT audit_log_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.idempotency_keys
    ADD CONSTRAINT idempotency_keys_pkey PRIMARY KEY (tenant, key);
ALTER TABLE ONLY public.job_events
    ADD CONSTRAINT job_events_pkey PRIMARY KEY (job_id, seq);
ALTER TABLE ONLY public.job_labels
    ADD CONSTRAINT job_labels_pkey PRIMARY KEY (job_id, name);
ALTER TABLE ONLY public.job_plans
    ADD CONSTRAINT job_plans_pkey PRIMARY KEY (job_id, digest);
ALTER TABLE ONLY public.job_refusals
    ADD CONSTRAINT job_refusals_pkey PRIMARY KEY (job_id, worker);
ALTER TABLE ONLY public.job_workers
    ADD CONSTRAINT job_workers_pkey PRIMARY KEY (job_id, token);
ALTER TABLE ONLY public.jobs
    ADD CONSTRAINT jobs_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.reshard_meta
    ADD CONSTRAINT reshard_meta_pkey PRIMARY KEY (name);
ALTER TABLE ONLY public.reshard_revision
    ADD CONSTRAINT reshard_revision_pkc PRIMARY KEY (version_num);
ALTER TABLE ONLY public.tenants
    ADD CONSTRAINT tenants_pkey PRIMARY KEY (name);
ALTER TABLE ONLY public.tokens
    ADD CONSTRAINT tokens_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.totals
    ADD CONSTRAINT totals_pkey PRIMARY KEY (name, label);
ALTER TABLE ONLY public.webhook_deliveries
    ADD CONSTRAINT webhook_deliveries_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.webhooks
    ADD CONSTRAINT webhooks_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.workers
    ADD CONSTRAINT workers_pkey PRIMARY KEY (name);
CREATE INDEX audit_log_by_age ON public.audit_log USING btree (at);
CREATE INDEX audit_log_of_tenant ON public.audit_log USING btree (tenant, id);
CREATE INDEX idempotency_keys_by_job ON public.idempotency_keys USING btree (job_id);
CREATE INDEX job_labels_by_value ON public.job_labels USING btree (name, value);
CREATE INDEX job_refusals_by_worker ON public.job_refusals USING btree (worker, at);
CREATE INDEX job_workers_present ON public.job_workers USING btree (job_id) WHERE (left_at IS NULL);
CREATE INDEX jobs_by_age ON public.jobs USING btree (created_at, id);
CREATE INDEX jobs_by_discard ON public.jobs USING btree (discard_at);
CREATE UNIQUE INDEX jobs_by_public_id ON public.jobs USING btree (tenant, COALESCE(given_id, id));
CREATE INDEX jobs_by_source ON public.jobs USING btree (tenant, substr(source, 1, 250));
CREATE INDEX jobs_by_state ON public.jobs USING btree (state, created_at);
CREATE INDEX jobs_by_target ON public.jobs USING btree (target);
CREATE INDEX jobs_of_tenant ON public.jobs USING btree (tenant, created_at, id);
CREATE INDEX jobs_of_tenant_by_state ON public.jobs USING btree (state, tenant, created_at);
CREATE INDEX tokens_of_tenant ON public.tokens USING btree (tenant, created_at, id);
CREATE INDEX webhook_deliveries_due ON public.webhook_deliveries USING btree (state, next_at);
CREATE INDEX webhook_deliveries_of_webhook ON public.webhook_deliveries USING btree (webhook_id, created_at);
CREATE INDEX webhook_deliveries_sent_now ON public.webhook_deliveries USING btree (webhook_id, lease_until);
CREATE INDEX webhooks_of_tenant ON public.webhooks USING btree (tenant, created_at);
CREATE INDEX workers_by_seen ON public.workers USING btree (seen_at);
ALTER TABLE ONLY public.idempotency_keys
    ADD CONSTRAINT idempotency_keys_job_id_fkey FOREIGN KEY (job_id) REFERENCES public.jobs(id) ON DELETE CASCADE;
ALTER TABLE ONLY public.job_events
    ADD CONSTRAINT job_events_job_id_fkey FOREIGN KEY (job_id) REFERENCES public.jobs(id) ON DELETE CASCADE;
ALTER TABLE ONLY public.job_labels
    ADD CONSTRAINT job_labels_job_id_fkey FOREIGN KEY (job_id) REFERENCES public.jobs(id) ON DELETE CASCADE;
ALTER TABLE ONLY public.job_plans
    ADD CONSTRAINT job_plans_job_id_fkey FOREIGN KEY (job_id) REFERENCES public.jobs(id) ON DELETE CASCADE;
ALTER TABLE ONLY public.job_refusals
    ADD CONSTRAINT job_refusals_job_id_fkey FOREIGN KEY (job_id) REFERENCES public.jobs(id) ON DELETE CASCADE;
ALTER TABLE ONLY public.job_workers
    ADD CONSTRAINT job_workers_job_id_fkey FOREIGN KEY (job_id) REFERENCES public.jobs(id) ON DELETE CASCADE;
ALTER TABLE ONLY public.tokens
    ADD CONSTRAINT tokens_tenant_fkey FOREIGN KEY (tenant) REFERENCES public.tenants(name) ON DELETE CASCADE;
