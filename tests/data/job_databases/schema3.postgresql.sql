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
CREATE TABLE public.idempotency_keys (
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
    priority integer DEFAULT 0 NOT NULL,
    max_workers integer DEFAULT 0 NOT NULL,
    takes_workers integer DEFAULT 0 NOT NULL,
    releases integer NOT NULL,
    retries integer DEFAULT 0 NOT NULL,
    discard_at double precision,
    discard_asked integer DEFAULT 0 NOT NULL,
    discard_tries integer DEFAULT 0 NOT NULL,
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
    finished_at double precision
);
CREATE TABLE public.reshard_meta (
    name character varying(64) NOT NULL,
    value text NOT NULL
);
CREATE TABLE public.workers (
    name character varying(200) NOT NULL,
    started_at double precision NOT NULL,
    seen_at double precision NOT NULL,
    good_at double precision NOT NULL,
    quarantined_until double precision NOT NULL,
    quarantines integer NOT NULL,
    problem text
);
INSERT INTO public.idempotency_keys VALUES ('a-key', 'ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff', '30accef0fea7be022b2e1c2bc738c8ea', 1795465482.44819, 'job_7kbjuxjcj7ff3v7kwj5p5m2d');
INSERT INTO public.idempotency_keys VALUES ('a-held-key', 'eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee', 'd1570e571a82486c79343cb36e468f8f', 1795465482.455342, NULL);
INSERT INTO public.job_events VALUES ('job_ocwpff3qyqgr3ynzyjzo4by4', 1, 1795465452.443847, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_7kbjuxjcj7ff3v7kwj5p5m2d', 1, 1795465452.452131, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_lcm6h4ymjefvuog2oihmdwap', 1, 1795465452.458377, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_lcm6h4ymjefvuog2oihmdwap', 2, 1795465452.474502, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_lcm6h4ymjefvuog2oihmdwap', 3, 1795465452.494359, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_lcm6h4ymjefvuog2oihmdwap', 4, 1795465452.498172, 'state', 'QUEUED', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_2rx3k2mlubjnih3is5nlwkwb', 1, 1795465452.506781, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_2rx3k2mlubjnih3is5nlwkwb', 2, 1795465452.515975, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_2rx3k2mlubjnih3is5nlwkwb', 3, 1795465452.530672, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_2rx3k2mlubjnih3is5nlwkwb', 4, 1795465452.536139, 'state', 'QUEUED', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_lizqiyabxfx62hoqi27hbnft', 1, 1795465452.543354, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_lizqiyabxfx62hoqi27hbnft', 2, 1795465452.550606, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_wweejc4uy6azsalnhwf2ihde', 1, 1795465452.562595, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_wweejc4uy6azsalnhwf2ihde', 2, 1795465452.57088, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_wweejc4uy6azsalnhwf2ihde', 3, 1795465452.587007, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_qzjqt222patm2yuxvjpo2owv', 1, 1795465452.592723, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_qzjqt222patm2yuxvjpo2owv', 2, 1795465452.602265, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_qzjqt222patm2yuxvjpo2owv', 3, 1795465452.621266, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_qzjqt222patm2yuxvjpo2owv', 4, 1795465452.628046, 'state', 'VERIFYING', '{"phase":"verifying","bytes_done":2,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":false}', NULL);
INSERT INTO public.job_events VALUES ('job_tjg65hyzjlff34rjyvkxijis', 1, 1795465452.633408, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_tjg65hyzjlff34rjyvkxijis', 2, 1795465452.64197, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_tjg65hyzjlff34rjyvkxijis', 3, 1795465452.659766, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_tjg65hyzjlff34rjyvkxijis', 4, 1795465452.664458, 'state', 'VERIFYING', '{"phase":"verifying","bytes_done":2,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":false}', NULL);
INSERT INTO public.job_events VALUES ('job_tjg65hyzjlff34rjyvkxijis', 5, 1795465452.671317, 'state', 'SUCCEEDED', '{"phase":"verifying","bytes_done":2,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":false}', NULL);
INSERT INTO public.job_events VALUES ('job_rdjobzcg3q35sh2rmqy3iux5', 1, 1795465452.67528, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_rdjobzcg3q35sh2rmqy3iux5', 2, 1795465452.687131, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_rdjobzcg3q35sh2rmqy3iux5', 3, 1795465452.704471, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_rdjobzcg3q35sh2rmqy3iux5', 4, 1795465452.71711, 'state', 'FAILED', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_x6gevpbz2u2nra5nvpydjce2', 1, 1795465452.723893, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_x6gevpbz2u2nra5nvpydjce2', 2, 1795465452.728802, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_x6gevpbz2u2nra5nvpydjce2', 3, 1795465452.735978, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_x6gevpbz2u2nra5nvpydjce2', 4, 1795465452.749265, 'state', 'FAILED', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_xbzvvi64vsaxxdllhfgetcoe', 1, 1795465452.754859, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_xbzvvi64vsaxxdllhfgetcoe', 2, 1795465452.760371, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_xbzvvi64vsaxxdllhfgetcoe', 3, 1795465452.765007, 'state', 'FAILED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_q5hoocoz4w5msja6dbfjfn7e', 1, 1795465452.768168, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_q5hoocoz4w5msja6dbfjfn7e', 2, 1795465452.788453, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_q5hoocoz4w5msja6dbfjfn7e', 3, 1795465452.800831, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_q5hoocoz4w5msja6dbfjfn7e', 4, 1795465452.807405, 'state', 'FAILED', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_kjduinolptahfp6olm3vp4ou', 1, 1795465452.810747, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_kjduinolptahfp6olm3vp4ou', 2, 1795465452.814426, 'state', 'CANCELLED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_5b5cenprhnezhmi2mfjrzpxn', 1, 1795465452.817999, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_5b5cenprhnezhmi2mfjrzpxn', 2, 1795465452.822337, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_5b5cenprhnezhmi2mfjrzpxn', 3, 1795465452.827974, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_5b5cenprhnezhmi2mfjrzpxn', 4, 1795465452.834817, 'state', 'CANCELLING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_5b5cenprhnezhmi2mfjrzpxn', 5, 1795465452.838878, 'state', 'CANCELLED', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_chwnfdcfpo66inzgf4xqj5rh', 1, 1795465452.842401, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_chwnfdcfpo66inzgf4xqj5rh', 2, 1795465452.848109, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_chwnfdcfpo66inzgf4xqj5rh', 3, 1795465452.854792, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_chwnfdcfpo66inzgf4xqj5rh', 4, 1795465452.857801, 'state', 'CANCELLING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_t54hylvf3uw77xk76vo64bkg', 1, 1795465452.861003, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_su2ftb6w4ryb2s72b7gpizly', 1, 1795465452.867404, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_32paacexhtt2eqiyh3vcvxgt', 1, 1795465452.869821, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_32paacexhtt2eqiyh3vcvxgt', 2, 1795465452.874603, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_32paacexhtt2eqiyh3vcvxgt', 3, 1795465452.880703, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_32paacexhtt2eqiyh3vcvxgt', 4, 1795465452.904574, 'worker', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', '{"worker":"helper-1","role":"helper","attempt":1,"joined_at":"2026-11-23T20:24:12.901417Z","left_at":null,"share":null}');
INSERT INTO public.job_events VALUES ('job_32paacexhtt2eqiyh3vcvxgt', 5, 1795465452.911881, 'worker', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', '{"worker":"helper-2","role":"helper","attempt":1,"joined_at":"2026-11-23T20:24:12.910495Z","left_at":null,"share":null}');
INSERT INTO public.job_events VALUES ('job_32paacexhtt2eqiyh3vcvxgt', 6, 1795465452.920426, 'worker', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', '{"worker":"helper-1","role":"helper","attempt":1,"joined_at":"2026-11-23T20:24:12.901417Z","left_at":"2026-11-23T20:24:12.918821Z","share":{"runs":2,"takeovers":0,"splits":0,"epochs_lost":0,"units":5,"write_bytes":99}}');
INSERT INTO public.job_events VALUES ('job_p6krrtdvawscjphs5bi6lgz4', 1, 1795465452.930878, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_p6krrtdvawscjphs5bi6lgz4', 2, 1795465452.938927, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_p6krrtdvawscjphs5bi6lgz4', 3, 1795465452.947786, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_p6krrtdvawscjphs5bi6lgz4', 4, 1795465452.955674, 'state', 'QUEUED', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_ozi5d4mb43eqtnkfz3263u4n', 1, 1795465452.960397, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_ozi5d4mb43eqtnkfz3263u4n', 2, 1795465452.964787, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_ozi5d4mb43eqtnkfz3263u4n', 3, 1795465452.969732, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_ozi5d4mb43eqtnkfz3263u4n', 4, 1795465452.971968, 'state', 'FAILED', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_ozi5d4mb43eqtnkfz3263u4n', 5, 1795465452.98111, 'state', 'QUEUED', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_labels VALUES ('job_ocwpff3qyqgr3ynzyjzo4by4', 'case', 'queued');
INSERT INTO public.job_labels VALUES ('job_ocwpff3qyqgr3ynzyjzo4by4', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_7kbjuxjcj7ff3v7kwj5p5m2d', 'case', 'with-a-key');
INSERT INTO public.job_labels VALUES ('job_7kbjuxjcj7ff3v7kwj5p5m2d', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_lcm6h4ymjefvuog2oihmdwap', 'case', 'released');
INSERT INTO public.job_labels VALUES ('job_lcm6h4ymjefvuog2oihmdwap', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_2rx3k2mlubjnih3is5nlwkwb', 'case', 'to-be-tried-again');
INSERT INTO public.job_labels VALUES ('job_2rx3k2mlubjnih3is5nlwkwb', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_lizqiyabxfx62hoqi27hbnft', 'case', 'planning');
INSERT INTO public.job_labels VALUES ('job_lizqiyabxfx62hoqi27hbnft', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_wweejc4uy6azsalnhwf2ihde', 'case', 'running');
INSERT INTO public.job_labels VALUES ('job_wweejc4uy6azsalnhwf2ihde', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_qzjqt222patm2yuxvjpo2owv', 'case', 'verifying');
INSERT INTO public.job_labels VALUES ('job_qzjqt222patm2yuxvjpo2owv', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_tjg65hyzjlff34rjyvkxijis', 'case', 'succeeded');
INSERT INTO public.job_labels VALUES ('job_tjg65hyzjlff34rjyvkxijis', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_rdjobzcg3q35sh2rmqy3iux5', 'case', 'failed');
INSERT INTO public.job_labels VALUES ('job_rdjobzcg3q35sh2rmqy3iux5', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_x6gevpbz2u2nra5nvpydjce2', 'case', 'failed-and-unwanted');
INSERT INTO public.job_labels VALUES ('job_x6gevpbz2u2nra5nvpydjce2', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_xbzvvi64vsaxxdllhfgetcoe', 'case', 'failed-at-once');
INSERT INTO public.job_labels VALUES ('job_xbzvvi64vsaxxdllhfgetcoe', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_q5hoocoz4w5msja6dbfjfn7e', 'case', 'exhausted');
INSERT INTO public.job_labels VALUES ('job_q5hoocoz4w5msja6dbfjfn7e', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_kjduinolptahfp6olm3vp4ou', 'case', 'cancelled-before');
INSERT INTO public.job_labels VALUES ('job_kjduinolptahfp6olm3vp4ou', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_5b5cenprhnezhmi2mfjrzpxn', 'case', 'cancelled');
INSERT INTO public.job_labels VALUES ('job_5b5cenprhnezhmi2mfjrzpxn', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_chwnfdcfpo66inzgf4xqj5rh', 'case', 'cancelling');
INSERT INTO public.job_labels VALUES ('job_chwnfdcfpo66inzgf4xqj5rh', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_t54hylvf3uw77xk76vo64bkg', 'case', 'a-plan');
INSERT INTO public.job_labels VALUES ('job_t54hylvf3uw77xk76vo64bkg', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_su2ftb6w4ryb2s72b7gpizly', 'case', 'planned');
INSERT INTO public.job_labels VALUES ('job_32paacexhtt2eqiyh3vcvxgt', 'case', 'shared');
INSERT INTO public.job_labels VALUES ('job_32paacexhtt2eqiyh3vcvxgt', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_p6krrtdvawscjphs5bi6lgz4', 'case', 'refused');
INSERT INTO public.job_labels VALUES ('job_p6krrtdvawscjphs5bi6lgz4', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_ozi5d4mb43eqtnkfz3263u4n', 'case', 'retried');
INSERT INTO public.job_labels VALUES ('job_ozi5d4mb43eqtnkfz3263u4n', 'team', 'x');
INSERT INTO public.job_plans VALUES ('job_lcm6h4ymjefvuog2oihmdwap', 'plan-of-released');
INSERT INTO public.job_plans VALUES ('job_2rx3k2mlubjnih3is5nlwkwb', 'plan-of-to-be-tried-again');
INSERT INTO public.job_plans VALUES ('job_wweejc4uy6azsalnhwf2ihde', 'plan-of-running');
INSERT INTO public.job_plans VALUES ('job_qzjqt222patm2yuxvjpo2owv', 'plan-of-verifying');
INSERT INTO public.job_plans VALUES ('job_rdjobzcg3q35sh2rmqy3iux5', 'plan-of-failed');
INSERT INTO public.job_plans VALUES ('job_x6gevpbz2u2nra5nvpydjce2', 'plan-of-failed-and-unwanted');
INSERT INTO public.job_plans VALUES ('job_q5hoocoz4w5msja6dbfjfn7e', 'plan-of-exhausted');
INSERT INTO public.job_plans VALUES ('job_chwnfdcfpo66inzgf4xqj5rh', 'plan-of-cancelling');
INSERT INTO public.job_plans VALUES ('job_32paacexhtt2eqiyh3vcvxgt', 'plan-of-shared');
INSERT INTO public.job_plans VALUES ('job_p6krrtdvawscjphs5bi6lgz4', 'plan-of-refused');
INSERT INTO public.job_plans VALUES ('job_ozi5d4mb43eqtnkfz3263u4n', 'plan-of-retried');
INSERT INTO public.job_refusals VALUES ('job_p6krrtdvawscjphs5bi6lgz4', 'old-worker', 'storage.unavailable', 1795465452.949836);
INSERT INTO public.job_workers VALUES ('job_lcm6h4ymjefvuog2oihmdwap', 'd9295a6ba30293432435a79a30212e1d', 'old-worker', 'owner', 1, 1795465452.477004, NULL, 1795465452.49927, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_2rx3k2mlubjnih3is5nlwkwb', '086b1ac1d51c98b5c9bfa2c6b139953d', 'old-worker', 'owner', 1, 1795465452.517371, NULL, 1795465452.536741, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_lizqiyabxfx62hoqi27hbnft', '6f907203d21794d643f998829820acf4', 'old-worker', 'owner', 1, 1795465452.551676, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_wweejc4uy6azsalnhwf2ihde', '45f4a72692b6f0d4e712d72ad48ccda6', 'old-worker', 'owner', 1, 1795465452.572974, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_qzjqt222patm2yuxvjpo2owv', 'a487e8b5ae3e9925cdcb0027af1be1eb', 'old-worker', 'owner', 1, 1795465452.603682, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_tjg65hyzjlff34rjyvkxijis', '543f1948c209aa6d3a9030977f19f1e0', 'old-worker', 'owner', 1, 1795465452.647281, NULL, 1795465452.672424, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_rdjobzcg3q35sh2rmqy3iux5', '3dc0317d1e5b61ffc1b8a23e574aeb56', 'old-worker', 'owner', 1, 1795465452.688257, NULL, 1795465452.719013, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_x6gevpbz2u2nra5nvpydjce2', '82e41cb03afb8a2724439a4eb210deba', 'old-worker', 'owner', 1, 1795465452.729658, NULL, 1795465452.750822, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_xbzvvi64vsaxxdllhfgetcoe', 'b1baa8f6053e7c0c648a53702431de27', 'old-worker', 'owner', 1, 1795465452.761244, NULL, 1795465452.765763, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_q5hoocoz4w5msja6dbfjfn7e', 'efe61fd1517843510d534c0139693340', 'old-worker', 'owner', 1, 1795465452.792932, NULL, 1795465452.807877, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_5b5cenprhnezhmi2mfjrzpxn', '0706e58c0d85d0c9e1a8ed49f01ce121', 'old-worker', 'owner', 1, 1795465452.823128, NULL, 1795465452.839602, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_chwnfdcfpo66inzgf4xqj5rh', '2707917a748cf966e3a11fda27316b5b', 'old-worker', 'owner', 1, 1795465452.849424, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_32paacexhtt2eqiyh3vcvxgt', 'c5f8a2a3b11d9f2ac2835efd17ba8d1b', 'old-worker', 'owner', 1, 1795465452.875767, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_32paacexhtt2eqiyh3vcvxgt', '29252815a9c7d027f2afdcb1cb7d2cea', 'helper-2', 'helper', 1, 1795465452.910495, 1795465512.910497, NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_32paacexhtt2eqiyh3vcvxgt', '88731d83de1b300ef6f61fc4c04347da', 'helper-1', 'helper', 1, 1795465452.901417, 1795465512.90142, 1795465452.918821, 0, 2, 0, 0, 0, 5, 99);
INSERT INTO public.job_workers VALUES ('job_p6krrtdvawscjphs5bi6lgz4', '5b4575aaf1321e9e76c75a9039f67b7e', 'old-worker', 'owner', 1, 1795465452.939709, NULL, 1795465452.956098, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_ozi5d4mb43eqtnkfz3263u4n', 'ead369150304d9c1bb6617e495cc0022', 'old-worker', 'owner', 1, 1795465452.965531, NULL, 1795465452.972377, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.jobs VALUES ('job_ocwpff3qyqgr3ynzyjzo4by4', 'convert', 'QUEUED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/queued","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/queued', 0, 3, 0, 0, 0, 0, 0, NULL, 0, 0, NULL, NULL, NULL, 0, 0, 0, NULL, NULL, NULL, NULL, 1, 1795465452.44038, NULL, NULL);
INSERT INTO public.jobs VALUES ('job_7kbjuxjcj7ff3v7kwj5p5m2d', 'convert', 'QUEUED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/with-a-key","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/with-a-key', 0, 3, 0, 0, 0, 0, 0, NULL, 0, 0, NULL, NULL, NULL, 0, 0, 0, NULL, NULL, NULL, NULL, 1, 1795465452.450912, NULL, NULL);
INSERT INTO public.jobs VALUES ('job_lcm6h4ymjefvuog2oihmdwap', 'convert', 'QUEUED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/released","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/released', 1, 3, 0, 0, 1, 1, 0, NULL, 0, 0, NULL, NULL, NULL, 0, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', 'plan-of-released', NULL, NULL, 4, 1795465452.457133, 1795465452.469592, NULL);
INSERT INTO public.jobs VALUES ('job_2rx3k2mlubjnih3is5nlwkwb', 'convert', 'QUEUED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/to-be-tried-again","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/to-be-tried-again', 1, 3, 0, 0, 1, 0, 0, NULL, 0, 0, NULL, NULL, NULL, 1795465452.544187, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', 'plan-of-to-be-tried-again', '{"type":"urn:reshard:error:storage.unavailable","title":"The store timed out or throttled.","status":503,"detail":"the store did not answer","code":"storage.unavailable","fix":"look at the store","retryable":true,"details":{}}', NULL, 4, 1795465452.503781, 1795465452.514801, NULL);
INSERT INTO public.jobs VALUES ('job_lizqiyabxfx62hoqi27hbnft', 'convert', 'PLANNING', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/planning","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/planning', 1, 3, 0, 0, 0, 0, 0, NULL, 0, 0, '6f907203d21794d643f998829820acf4', 'old-worker', 1795465512.549863, 0, 0, 0, NULL, NULL, NULL, NULL, 2, 1795465452.542227, 1795465452.549864, NULL);
INSERT INTO public.jobs VALUES ('job_wweejc4uy6azsalnhwf2ihde', 'convert', 'RUNNING', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/running","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/running', 1, 3, 0, 0, 1, 0, 0, NULL, 0, 0, '45f4a72692b6f0d4e712d72ad48ccda6', 'old-worker', 1795465512.586243, 0, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', 'plan-of-running', NULL, NULL, 3, 1795465452.561478, 1795465452.568679, NULL);
INSERT INTO public.jobs VALUES ('job_qzjqt222patm2yuxvjpo2owv', 'convert', 'VERIFYING', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/verifying","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/verifying', 1, 3, 0, 0, 0, 0, 0, NULL, 0, 0, 'a487e8b5ae3e9925cdcb0027af1be1eb', 'old-worker', 1795465512.626992, 0, 0, 0, '{"phase":"verifying","bytes_done":2,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":false}', 'plan-of-verifying', NULL, NULL, 4, 1795465452.59174, 1795465452.600459, NULL);
INSERT INTO public.jobs VALUES ('job_tjg65hyzjlff34rjyvkxijis', 'convert', 'SUCCEEDED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/succeeded","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/succeeded', 1, 3, 0, 0, 0, 0, 0, NULL, 0, 0, '543f1948c209aa6d3a9030977f19f1e0', 'old-worker', NULL, 0, 0, 0, '{"phase":"verifying","bytes_done":2,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":false}', 'd', NULL, '{"schema_version":1,"target":"/frozen/succeeded","to":"universal","files":[],"read_bytes":1,"write_bytes":2,"server_copied_bytes":0,"resumed_bytes":0,"seconds":{},"plan_digest":"d","already_done":false,"verification":"default","warnings":[],"not_carried":[],"casts":[],"share":null}', 5, 1795465452.632276, 1795465452.641203, 1795465452.670061);
INSERT INTO public.jobs VALUES ('job_rdjobzcg3q35sh2rmqy3iux5', 'convert', 'FAILED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/failed","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/failed', 1, 3, 0, 0, 1, 0, 0, 1795551852.714984, 0, 0, '3dc0317d1e5b61ffc1b8a23e574aeb56', 'old-worker', NULL, 0, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', 'plan-of-failed', '{"type":"urn:reshard:error:checkpoint.incomplete","title":"Files or parts of tensors are missing.","status":422,"detail":"rank 1 is missing","code":"checkpoint.incomplete","fix":"copy it again","retryable":false,"details":{}}', NULL, 4, 1795465452.674431, 1795465452.681723, 1795465452.714994);
INSERT INTO public.jobs VALUES ('job_t54hylvf3uw77xk76vo64bkg', 'convert', 'QUEUED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/a-plan","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/a-plan', 0, 3, 0, 0, 0, 0, 0, NULL, 0, 0, NULL, NULL, NULL, 0, 0, 0, NULL, NULL, NULL, NULL, 1, 1795465452.860226, NULL, NULL);
INSERT INTO public.jobs VALUES ('job_su2ftb6w4ryb2s72b7gpizly', 'plan', 'QUEUED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/a-plan","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '', 0, 3, 0, 0, 0, 0, 0, NULL, 0, 0, NULL, NULL, NULL, 0, 0, 0, NULL, NULL, NULL, NULL, 1, 1795465452.866422, NULL, NULL);
INSERT INTO public.jobs VALUES ('job_32paacexhtt2eqiyh3vcvxgt', 'convert', 'RUNNING', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/shared","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/shared', 1, 3, 5, 3, 1, 0, 0, NULL, 0, 0, 'c5f8a2a3b11d9f2ac2835efd17ba8d1b', 'old-worker', 1795465512.880224, 0, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', 'plan-of-shared', NULL, NULL, 6, 1795465452.869036, 1795465452.873984, NULL);
INSERT INTO public.jobs VALUES ('job_x6gevpbz2u2nra5nvpydjce2', 'convert', 'FAILED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/failed-and-unwanted","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/failed-and-unwanted', 1, 3, 0, 0, 1, 0, 0, 1795551852.748154, 0, 0, '82e41cb03afb8a2724439a4eb210deba', 'old-worker', NULL, 0, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', 'plan-of-failed-and-unwanted', '{"type":"urn:reshard:error:checkpoint.incomplete","title":"Files or parts of tensors are missing.","status":422,"detail":"rank 1 is missing","code":"checkpoint.incomplete","fix":"copy it again","retryable":false,"details":{}}', NULL, 4, 1795465452.722812, 1795465452.72817, 1795465452.748164);
INSERT INTO public.jobs VALUES ('job_xbzvvi64vsaxxdllhfgetcoe', 'convert', 'FAILED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/failed-at-once","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/failed-at-once', 1, 3, 0, 0, 0, 0, 0, NULL, 0, 0, 'b1baa8f6053e7c0c648a53702431de27', 'old-worker', NULL, 0, 0, 0, NULL, NULL, '{"type":"urn:reshard:error:checkpoint.incomplete","title":"Files or parts of tensors are missing.","status":422,"detail":"rank 1 is missing","code":"checkpoint.incomplete","fix":"copy it again","retryable":false,"details":{}}', NULL, 3, 1795465452.753847, 1795465452.759683, 1795465452.764282);
INSERT INTO public.jobs VALUES ('job_ozi5d4mb43eqtnkfz3263u4n', 'convert', 'QUEUED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/retried","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/retried', 1, 3, 0, 0, 1, 1, 1, NULL, 0, 0, NULL, NULL, NULL, 0, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', 'plan-of-retried', NULL, NULL, 5, 1795465452.959548, 1795465452.963929, NULL);
INSERT INTO public.jobs VALUES ('job_p6krrtdvawscjphs5bi6lgz4', 'convert', 'QUEUED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/refused","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/refused', 1, 3, 0, 0, 1, 1, 0, NULL, 0, 0, NULL, NULL, NULL, 0, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', 'plan-of-refused', '{"type":"urn:reshard:error:storage.unavailable","title":"The store timed out or throttled.","status":503,"detail":"the store did not answer","code":"storage.unavailable","fix":"look at the store","retryable":true,"details":{}}', NULL, 4, 1795465452.929756, 1795465452.938252, NULL);
INSERT INTO public.jobs VALUES ('job_q5hoocoz4w5msja6dbfjfn7e', 'convert', 'FAILED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/exhausted","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/exhausted', 1, 1, 0, 0, 1, 0, 0, 1795551852.806474, 0, 0, 'efe61fd1517843510d534c0139693340', 'old-worker', NULL, 0, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', 'plan-of-exhausted', '{"type":"urn:reshard:error:job.attempts_exhausted","title":"The job lost its worker in every allowed attempt.","status":500,"detail":"1 attempts were lost; the last one: the store did not answer","code":"job.attempts_exhausted","fix":"look at the worker''s log for the cause, then submit the job again: finished work is kept","retryable":false,"details":{"attempts":1,"last_error":{"type":"urn:reshard:error:storage.unavailable","title":"The store timed out or throttled.","status":503,"detail":"the store did not answer","code":"storage.unavailable","fix":"look at the store","retryable":true,"details":{}}}}', NULL, 4, 1795465452.767374, 1795465452.783908, 1795465452.80648);
INSERT INTO public.jobs VALUES ('job_kjduinolptahfp6olm3vp4ou', 'convert', 'CANCELLED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/cancelled-before","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/cancelled-before', 0, 3, 0, 0, 0, 0, 0, NULL, 0, 0, NULL, NULL, NULL, 0, 0, 1, NULL, NULL, NULL, NULL, 2, 1795465452.809864, NULL, 1795465452.813227);
INSERT INTO public.jobs VALUES ('job_5b5cenprhnezhmi2mfjrzpxn', 'convert', 'CANCELLED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/cancelled","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/cancelled', 1, 3, 0, 0, 1, 0, 0, NULL, 0, 0, '0706e58c0d85d0c9e1a8ed49f01ce121', 'old-worker', NULL, 0, 0, 1, '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', 'plan-of-cancelled', NULL, NULL, 5, 1795465452.817247, 1795465452.821749, 1795465452.838165);
INSERT INTO public.jobs VALUES ('job_chwnfdcfpo66inzgf4xqj5rh', 'convert', 'CANCELLING', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/cancelling","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/cancelling', 1, 3, 0, 0, 1, 0, 0, NULL, 0, 0, '2707917a748cf966e3a11fda27316b5b', 'old-worker', 1795465512.854229, 0, 0, 1, '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', 'plan-of-cancelling', NULL, NULL, 4, 1795465452.841182, 1795465452.846152, NULL);
INSERT INTO public.reshard_meta VALUES ('schema_version', '3');
INSERT INTO public.workers VALUES ('old-worker', 1795465452.92602, 1795465452.926027, 0, 0, 0, NULL);
INSERT INTO public.workers VALUES ('another-worker', 1795465452.92819, 1795465452.928194, 1795465452.957817, 0, 0, NULL);
ALTER TABLE ONLY public.idempotency_keys
    ADD CONSTRAINT idempotency_keys_pkey PRIMARY KEY (key);
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
ALTER TABLE ONLY public.workers
    ADD CONSTRAINT workers_pkey PRIMARY KEY (name);
CREATE INDEX idempotency_keys_by_job ON public.idempotency_keys USING btree (job_id);
CREATE INDEX job_labels_by_value ON public.job_labels USING btree (name, value);
CREATE INDEX job_refusals_by_worker ON public.job_refusals USING btree (worker, at);
CREATE INDEX jobs_by_age ON public.jobs USING btree (created_at, id);
CREATE INDEX jobs_by_discard ON public.jobs USING btree (discard_at);
CREATE INDEX jobs_by_state ON public.jobs USING btree (state, created_at);
CREATE INDEX jobs_by_target ON public.jobs USING btree (target);
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
