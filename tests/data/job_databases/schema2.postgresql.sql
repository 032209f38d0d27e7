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
INSERT INTO public.idempotency_keys VALUES ('a-key', 'ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff', '928a7fac5d8cef916a8b3f28ecb841c0', 1795465479.615996, 'job_pkpippskacybcqfslzeeiwzv');
INSERT INTO public.idempotency_keys VALUES ('a-held-key', 'eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee', '2833e6501e859e7ca356f338f62c37f0', 1795465479.627652, NULL);
INSERT INTO public.job_events VALUES ('job_5tkq6y4wz75zsrzdc7lx4yjk', 1, 1795465449.611327, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_pkpippskacybcqfslzeeiwzv', 1, 1795465449.624392, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_iwmvlniilncmz5rooh47jozc', 1, 1795465449.632683, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_iwmvlniilncmz5rooh47jozc', 2, 1795465449.658296, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_iwmvlniilncmz5rooh47jozc', 3, 1795465449.667717, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_iwmvlniilncmz5rooh47jozc', 4, 1795465449.675232, 'state', 'QUEUED', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_ebrz6jqyj5vrwkdxhh7b3ri2', 1, 1795465449.68254, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_ebrz6jqyj5vrwkdxhh7b3ri2', 2, 1795465449.688353, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_ebrz6jqyj5vrwkdxhh7b3ri2', 3, 1795465449.702201, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_ebrz6jqyj5vrwkdxhh7b3ri2', 4, 1795465449.707465, 'state', 'QUEUED', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_2slog7xn2tsurdowtqm4e6ye', 1, 1795465449.712868, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_2slog7xn2tsurdowtqm4e6ye', 2, 1795465449.719864, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_v2vhbfqkqoeiwnxg4dhlsgqz', 1, 1795465449.727121, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_v2vhbfqkqoeiwnxg4dhlsgqz', 2, 1795465449.732451, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_v2vhbfqkqoeiwnxg4dhlsgqz', 3, 1795465449.735648, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_uaobip4rgeust43u7nq3drwc', 1, 1795465449.737987, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_uaobip4rgeust43u7nq3drwc', 2, 1795465449.746842, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_uaobip4rgeust43u7nq3drwc', 3, 1795465449.750611, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_uaobip4rgeust43u7nq3drwc', 4, 1795465449.752648, 'state', 'VERIFYING', '{"phase":"verifying","bytes_done":2,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":false}', NULL);
INSERT INTO public.job_events VALUES ('job_cbe4ezdtht5nyoiie6qgnn5l', 1, 1795465449.75517, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_cbe4ezdtht5nyoiie6qgnn5l', 2, 1795465449.763165, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_cbe4ezdtht5nyoiie6qgnn5l', 3, 1795465449.766521, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_cbe4ezdtht5nyoiie6qgnn5l', 4, 1795465449.768455, 'state', 'VERIFYING', '{"phase":"verifying","bytes_done":2,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":false}', NULL);
INSERT INTO public.job_events VALUES ('job_cbe4ezdtht5nyoiie6qgnn5l', 5, 1795465449.775641, 'state', 'SUCCEEDED', '{"phase":"verifying","bytes_done":2,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":false}', NULL);
INSERT INTO public.job_events VALUES ('job_7j7dw727q746oi6g6wl3lyoi', 1, 1795465449.784109, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_7j7dw727q746oi6g6wl3lyoi', 2, 1795465449.792731, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_7j7dw727q746oi6g6wl3lyoi', 3, 1795465449.796074, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_7j7dw727q746oi6g6wl3lyoi', 4, 1795465449.799378, 'state', 'FAILED', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_drvcvnmq5myl55dqm4lyibsh', 1, 1795465449.803013, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_drvcvnmq5myl55dqm4lyibsh', 2, 1795465449.811353, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_drvcvnmq5myl55dqm4lyibsh', 3, 1795465449.825406, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_drvcvnmq5myl55dqm4lyibsh', 4, 1795465449.828725, 'state', 'FAILED', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_432nxrx4h4b5q2rjpdmae6ri', 1, 1795465449.833929, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_432nxrx4h4b5q2rjpdmae6ri', 2, 1795465449.837875, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_432nxrx4h4b5q2rjpdmae6ri', 3, 1795465449.841195, 'state', 'FAILED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_3pxx4uinnsnxuo23rwflx5k3', 1, 1795465449.843824, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_3pxx4uinnsnxuo23rwflx5k3', 2, 1795465449.848869, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_3pxx4uinnsnxuo23rwflx5k3', 3, 1795465449.851694, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_3pxx4uinnsnxuo23rwflx5k3', 4, 1795465449.859901, 'state', 'FAILED', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_edphu53ocz5reh7qdl5jrhyr', 1, 1795465449.865189, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_edphu53ocz5reh7qdl5jrhyr', 2, 1795465449.868233, 'state', 'CANCELLED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_63skmuledydgbfm5mu3wlwaf', 1, 1795465449.871385, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_63skmuledydgbfm5mu3wlwaf', 2, 1795465449.875062, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_63skmuledydgbfm5mu3wlwaf', 3, 1795465449.877887, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_63skmuledydgbfm5mu3wlwaf', 4, 1795465449.884408, 'state', 'CANCELLING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_63skmuledydgbfm5mu3wlwaf', 5, 1795465449.887913, 'state', 'CANCELLED', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_cknyt6l5bapluxr6z6ml3hte', 1, 1795465449.890708, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_cknyt6l5bapluxr6z6ml3hte', 2, 1795465449.894029, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_cknyt6l5bapluxr6z6ml3hte', 3, 1795465449.897054, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_cknyt6l5bapluxr6z6ml3hte', 4, 1795465449.899871, 'state', 'CANCELLING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_4vmczafliasa42eaz7yolb3q', 1, 1795465449.902838, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_yjxfdatu5lrnz6xyjwzlvuf7', 1, 1795465449.907414, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_wz5dv75jy2fuuhdra5l4sluq', 1, 1795465449.909402, 'state', 'QUEUED', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_wz5dv75jy2fuuhdra5l4sluq', 2, 1795465449.914392, 'state', 'PLANNING', NULL, NULL);
INSERT INTO public.job_events VALUES ('job_wz5dv75jy2fuuhdra5l4sluq', 3, 1795465449.916855, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL);
INSERT INTO public.job_events VALUES ('job_wz5dv75jy2fuuhdra5l4sluq', 4, 1795465449.930283, 'worker', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', '{"worker":"helper-1","role":"helper","attempt":1,"joined_at":"2026-11-23T20:24:09.927784Z","left_at":null,"share":null}');
INSERT INTO public.job_events VALUES ('job_wz5dv75jy2fuuhdra5l4sluq', 5, 1795465449.939131, 'worker', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', '{"worker":"helper-2","role":"helper","attempt":1,"joined_at":"2026-11-23T20:24:09.937990Z","left_at":null,"share":null}');
INSERT INTO public.job_events VALUES ('job_wz5dv75jy2fuuhdra5l4sluq', 6, 1795465449.946623, 'worker', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', '{"worker":"helper-1","role":"helper","attempt":1,"joined_at":"2026-11-23T20:24:09.927784Z","left_at":"2026-11-23T20:24:09.945302Z","share":{"runs":2,"takeovers":0,"splits":0,"epochs_lost":0,"units":5,"write_bytes":99}}');
INSERT INTO public.job_labels VALUES ('job_5tkq6y4wz75zsrzdc7lx4yjk', 'case', 'queued');
INSERT INTO public.job_labels VALUES ('job_5tkq6y4wz75zsrzdc7lx4yjk', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_pkpippskacybcqfslzeeiwzv', 'case', 'with-a-key');
INSERT INTO public.job_labels VALUES ('job_pkpippskacybcqfslzeeiwzv', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_iwmvlniilncmz5rooh47jozc', 'case', 'released');
INSERT INTO public.job_labels VALUES ('job_iwmvlniilncmz5rooh47jozc', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_ebrz6jqyj5vrwkdxhh7b3ri2', 'case', 'to-be-tried-again');
INSERT INTO public.job_labels VALUES ('job_ebrz6jqyj5vrwkdxhh7b3ri2', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_2slog7xn2tsurdowtqm4e6ye', 'case', 'planning');
INSERT INTO public.job_labels VALUES ('job_2slog7xn2tsurdowtqm4e6ye', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_v2vhbfqkqoeiwnxg4dhlsgqz', 'case', 'running');
INSERT INTO public.job_labels VALUES ('job_v2vhbfqkqoeiwnxg4dhlsgqz', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_uaobip4rgeust43u7nq3drwc', 'case', 'verifying');
INSERT INTO public.job_labels VALUES ('job_uaobip4rgeust43u7nq3drwc', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_cbe4ezdtht5nyoiie6qgnn5l', 'case', 'succeeded');
INSERT INTO public.job_labels VALUES ('job_cbe4ezdtht5nyoiie6qgnn5l', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_7j7dw727q746oi6g6wl3lyoi', 'case', 'failed');
INSERT INTO public.job_labels VALUES ('job_7j7dw727q746oi6g6wl3lyoi', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_drvcvnmq5myl55dqm4lyibsh', 'case', 'failed-and-unwanted');
INSERT INTO public.job_labels VALUES ('job_drvcvnmq5myl55dqm4lyibsh', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_432nxrx4h4b5q2rjpdmae6ri', 'case', 'failed-at-once');
INSERT INTO public.job_labels VALUES ('job_432nxrx4h4b5q2rjpdmae6ri', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_3pxx4uinnsnxuo23rwflx5k3', 'case', 'exhausted');
INSERT INTO public.job_labels VALUES ('job_3pxx4uinnsnxuo23rwflx5k3', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_edphu53ocz5reh7qdl5jrhyr', 'case', 'cancelled-before');
INSERT INTO public.job_labels VALUES ('job_edphu53ocz5reh7qdl5jrhyr', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_63skmuledydgbfm5mu3wlwaf', 'case', 'cancelled');
INSERT INTO public.job_labels VALUES ('job_63skmuledydgbfm5mu3wlwaf', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_cknyt6l5bapluxr6z6ml3hte', 'case', 'cancelling');
INSERT INTO public.job_labels VALUES ('job_cknyt6l5bapluxr6z6ml3hte', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_4vmczafliasa42eaz7yolb3q', 'case', 'a-plan');
INSERT INTO public.job_labels VALUES ('job_4vmczafliasa42eaz7yolb3q', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_yjxfdatu5lrnz6xyjwzlvuf7', 'case', 'planned');
INSERT INTO public.job_labels VALUES ('job_wz5dv75jy2fuuhdra5l4sluq', 'case', 'shared');
INSERT INTO public.job_labels VALUES ('job_wz5dv75jy2fuuhdra5l4sluq', 'team', 'x');
INSERT INTO public.job_workers VALUES ('job_iwmvlniilncmz5rooh47jozc', '17833c57ab500b7e856265dcd0f04f93', 'old-worker', 'owner', 1, 1795465449.660344, NULL, 1795465449.678594, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_ebrz6jqyj5vrwkdxhh7b3ri2', '2959d8391d60509cd06daa94dde13cba', 'old-worker', 'owner', 1, 1795465449.68938, NULL, 1795465449.70803, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_2slog7xn2tsurdowtqm4e6ye', '8c2f725ccb7fb7c2c4528ce23b2e4bde', 'old-worker', 'owner', 1, 1795465449.721077, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_v2vhbfqkqoeiwnxg4dhlsgqz', '67a456263ea83f1a199c0f32835ca722', 'old-worker', 'owner', 1, 1795465449.73342, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_uaobip4rgeust43u7nq3drwc', 'e0f00721a08866a69655eae554dfe2a2', 'old-worker', 'owner', 1, 1795465449.748053, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_cbe4ezdtht5nyoiie6qgnn5l', 'ad6e607ee0da37f3608581484018b86a', 'old-worker', 'owner', 1, 1795465449.764149, NULL, 1795465449.77614, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_7j7dw727q746oi6g6wl3lyoi', '38bbec16f7d872b31fc617401ad377a4', 'old-worker', 'owner', 1, 1795465449.793701, NULL, 1795465449.799878, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_drvcvnmq5myl55dqm4lyibsh', 'ce24a83f537df7a67ffc396319e08cc0', 'old-worker', 'owner', 1, 1795465449.812228, NULL, 1795465449.830263, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_432nxrx4h4b5q2rjpdmae6ri', 'a4fbd63e4173c0bf2295fc9f5f87ab6d', 'old-worker', 'owner', 1, 1795465449.838699, NULL, 1795465449.841686, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_3pxx4uinnsnxuo23rwflx5k3', '54cadc3fc1054d6ad9f39b5623c88d52', 'old-worker', 'owner', 1, 1795465449.849608, NULL, 1795465449.862436, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_63skmuledydgbfm5mu3wlwaf', '479af7bb9c22239c1d546225611ba69d', 'old-worker', 'owner', 1, 1795465449.875793, NULL, 1795465449.888314, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_cknyt6l5bapluxr6z6ml3hte', 'beac152059e3f065f65f6fa86f390278', 'old-worker', 'owner', 1, 1795465449.894969, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_wz5dv75jy2fuuhdra5l4sluq', '8f428f958c40af6a814baca6e8b01d6f', 'old-worker', 'owner', 1, 1795465449.915071, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_wz5dv75jy2fuuhdra5l4sluq', 'ab7c5e6a42bc480b8edf61ca1ba29bdb', 'helper-2', 'helper', 1, 1795465449.93799, 1795465509.937992, NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.job_workers VALUES ('job_wz5dv75jy2fuuhdra5l4sluq', 'e868463bb8b93f06ab7cabdb3c5f89fd', 'helper-1', 'helper', 1, 1795465449.927784, 1795465509.927786, 1795465449.945302, 0, 2, 0, 0, 0, 5, 99);
INSERT INTO public.jobs VALUES ('job_5tkq6y4wz75zsrzdc7lx4yjk', 'convert', 'QUEUED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/queued","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/queued', 0, 3, 0, 0, 0, 0, NULL, NULL, NULL, 0, 0, 0, NULL, NULL, NULL, NULL, 1, 1795465449.607233, NULL, NULL);
INSERT INTO public.jobs VALUES ('job_pkpippskacybcqfslzeeiwzv', 'convert', 'QUEUED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/with-a-key","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/with-a-key', 0, 3, 0, 0, 0, 0, NULL, NULL, NULL, 0, 0, 0, NULL, NULL, NULL, NULL, 1, 1795465449.623278, NULL, NULL);
INSERT INTO public.jobs VALUES ('job_iwmvlniilncmz5rooh47jozc', 'convert', 'QUEUED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/released","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/released', 1, 3, 0, 0, 1, 1, NULL, NULL, NULL, 0, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL, NULL, NULL, 4, 1795465449.62946, 1795465449.653956, NULL);
INSERT INTO public.jobs VALUES ('job_ebrz6jqyj5vrwkdxhh7b3ri2', 'convert', 'QUEUED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/to-be-tried-again","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/to-be-tried-again', 1, 3, 0, 0, 1, 0, NULL, NULL, NULL, 1795465449.716409, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL, '{"type":"urn:reshard:error:storage.unavailable","title":"The store timed out or throttled.","status":503,"detail":"the store did not answer","code":"storage.unavailable","fix":"look at the store","retryable":true,"details":{}}', NULL, 4, 1795465449.681402, 1795465449.687596, NULL);
INSERT INTO public.jobs VALUES ('job_2slog7xn2tsurdowtqm4e6ye', 'convert', 'PLANNING', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/planning","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/planning', 1, 3, 0, 0, 0, 0, '8c2f725ccb7fb7c2c4528ce23b2e4bde', 'old-worker', 1795465509.71776, 0, 0, 0, NULL, NULL, NULL, NULL, 2, 1795465449.71058, 1795465449.717761, NULL);
INSERT INTO public.jobs VALUES ('job_v2vhbfqkqoeiwnxg4dhlsgqz', 'convert', 'RUNNING', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/running","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/running', 1, 3, 0, 0, 1, 0, '67a456263ea83f1a199c0f32835ca722', 'old-worker', 1795465509.735123, 0, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL, NULL, NULL, 3, 1795465449.726209, 1795465449.731739, NULL);
INSERT INTO public.jobs VALUES ('job_uaobip4rgeust43u7nq3drwc', 'convert', 'VERIFYING', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/verifying","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/verifying', 1, 3, 0, 0, 0, 0, 'e0f00721a08866a69655eae554dfe2a2', 'old-worker', 1795465509.752127, 0, 0, 0, '{"phase":"verifying","bytes_done":2,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":false}', NULL, NULL, NULL, 4, 1795465449.737234, 1795465449.742029, NULL);
INSERT INTO public.jobs VALUES ('job_cbe4ezdtht5nyoiie6qgnn5l', 'convert', 'SUCCEEDED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/succeeded","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/succeeded', 1, 3, 0, 0, 0, 0, 'ad6e607ee0da37f3608581484018b86a', 'old-worker', NULL, 0, 0, 0, '{"phase":"verifying","bytes_done":2,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":false}', 'd', NULL, '{"schema_version":1,"target":"/frozen/succeeded","to":"universal","files":[],"read_bytes":1,"write_bytes":2,"server_copied_bytes":0,"resumed_bytes":0,"seconds":{},"plan_digest":"d","already_done":false,"verification":"default","warnings":[],"not_carried":[],"casts":[],"share":null}', 5, 1795465449.754391, 1795465449.762544, 1795465449.774795);
INSERT INTO public.jobs VALUES ('job_7j7dw727q746oi6g6wl3lyoi', 'convert', 'FAILED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/failed","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/failed', 1, 3, 0, 0, 1, 0, '38bbec16f7d872b31fc617401ad377a4', 'old-worker', NULL, 0, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL, '{"type":"urn:reshard:error:checkpoint.incomplete","title":"Files or parts of tensors are missing.","status":422,"detail":"rank 1 is missing","code":"checkpoint.incomplete","fix":"copy it again","retryable":false,"details":{}}', NULL, 4, 1795465449.783121, 1795465449.791965, 1795465449.798407);
INSERT INTO public.jobs VALUES ('job_63skmuledydgbfm5mu3wlwaf', 'convert', 'CANCELLED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/cancelled","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/cancelled', 1, 3, 0, 0, 1, 0, '479af7bb9c22239c1d546225611ba69d', 'old-worker', NULL, 0, 0, 1, '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL, NULL, NULL, 5, 1795465449.8707, 1795465449.874582, 1795465449.887422);
INSERT INTO public.jobs VALUES ('job_drvcvnmq5myl55dqm4lyibsh', 'convert', 'FAILED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/failed-and-unwanted","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/failed-and-unwanted', 1, 3, 0, 0, 1, 0, 'ce24a83f537df7a67ffc396319e08cc0', 'old-worker', NULL, 0, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL, '{"type":"urn:reshard:error:checkpoint.incomplete","title":"Files or parts of tensors are missing.","status":422,"detail":"rank 1 is missing","code":"checkpoint.incomplete","fix":"copy it again","retryable":false,"details":{}}', NULL, 4, 1795465449.802203, 1795465449.81071, 1795465449.827913);
INSERT INTO public.jobs VALUES ('job_432nxrx4h4b5q2rjpdmae6ri', 'convert', 'FAILED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/failed-at-once","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/failed-at-once', 1, 3, 0, 0, 0, 0, 'a4fbd63e4173c0bf2295fc9f5f87ab6d', 'old-worker', NULL, 0, 0, 0, NULL, NULL, '{"type":"urn:reshard:error:checkpoint.incomplete","title":"Files or parts of tensors are missing.","status":422,"detail":"rank 1 is missing","code":"checkpoint.incomplete","fix":"copy it again","retryable":false,"details":{}}', NULL, 3, 1795465449.832928, 1795465449.837337, 1795465449.840262);
INSERT INTO public.jobs VALUES ('job_3pxx4uinnsnxuo23rwflx5k3', 'convert', 'FAILED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/exhausted","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/exhausted', 1, 1, 0, 0, 1, 0, '54cadc3fc1054d6ad9f39b5623c88d52', 'old-worker', NULL, 0, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL, '{"type":"urn:reshard:error:job.attempts_exhausted","title":"The job lost its worker in every allowed attempt.","status":500,"detail":"1 attempts were lost; the last one: the store did not answer","code":"job.attempts_exhausted","fix":"look at the worker''s log for the cause, then submit the job again: finished work is kept","retryable":false,"details":{"attempts":1,"last_error":{"type":"urn:reshard:error:storage.unavailable","title":"The store timed out or throttled.","status":503,"detail":"the store did not answer","code":"storage.unavailable","fix":"look at the store","retryable":true,"details":{}}}}', NULL, 4, 1795465449.843085, 1795465449.848335, 1795465449.859128);
INSERT INTO public.jobs VALUES ('job_edphu53ocz5reh7qdl5jrhyr', 'convert', 'CANCELLED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/cancelled-before","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/cancelled-before', 0, 3, 0, 0, 0, 0, NULL, NULL, NULL, 0, 0, 1, NULL, NULL, NULL, NULL, 2, 1795465449.864412, NULL, 1795465449.86743);
INSERT INTO public.jobs VALUES ('job_cknyt6l5bapluxr6z6ml3hte', 'convert', 'CANCELLING', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/cancelling","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/cancelling', 1, 3, 0, 0, 1, 0, 'beac152059e3f065f65f6fa86f390278', 'old-worker', 1795465509.896311, 0, 0, 1, '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL, NULL, NULL, 4, 1795465449.889933, 1795465449.893588, NULL);
INSERT INTO public.jobs VALUES ('job_4vmczafliasa42eaz7yolb3q', 'convert', 'QUEUED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/a-plan","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/a-plan', 0, 3, 0, 0, 0, 0, NULL, NULL, NULL, 0, 0, 0, NULL, NULL, NULL, NULL, 1, 1795465449.902078, NULL, NULL);
INSERT INTO public.jobs VALUES ('job_yjxfdatu5lrnz6xyjwzlvuf7', 'plan', 'QUEUED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/a-plan","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '', 0, 3, 0, 0, 0, 0, NULL, NULL, NULL, 0, 0, 0, NULL, NULL, NULL, NULL, 1, 1795465449.906671, NULL, NULL);
INSERT INTO public.jobs VALUES ('job_wz5dv75jy2fuuhdra5l4sluq', 'convert', 'RUNNING', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/shared","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}', '/frozen/shared', 1, 3, 5, 3, 1, 0, '8f428f958c40af6a814baca6e8b01d6f', 'old-worker', 1795465509.916414, 0, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}', NULL, NULL, NULL, 6, 1795465449.908764, 1795465449.91383, NULL);
INSERT INTO public.reshard_meta VALUES ('schema_version', '2');
ALTER TABLE ONLY public.idempotency_keys
    ADD CONSTRAINT idempotency_keys_pkey PRIMARY KEY (key);
ALTER TABLE ONLY public.job_events
    ADD CONSTRAINT job_events_pkey PRIMARY KEY (job_id, seq);
ALTER TABLE ONLY public.job_labels
    ADD CONSTRAINT job_labels_pkey PRIMARY KEY (job_id, name);
ALTER TABLE ONLY public.job_workers
    ADD CONSTRAINT job_workers_pkey PRIMARY KEY (job_id, token);
ALTER TABLE ONLY public.jobs
    ADD CONSTRAINT jobs_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.reshard_meta
    ADD CONSTRAINT reshard_meta_pkey PRIMARY KEY (name);
CREATE INDEX job_labels_by_value ON public.job_labels USING btree (name, value);
CREATE INDEX jobs_by_age ON public.jobs USING btree (created_at, id);
CREATE INDEX jobs_by_state ON public.jobs USING btree (state, created_at);
CREATE INDEX jobs_by_target ON public.jobs USING btree (target);
ALTER TABLE ONLY public.idempotency_keys
    ADD CONSTRAINT idempotency_keys_job_id_fkey FOREIGN KEY (job_id) REFERENCES public.jobs(id) ON DELETE CASCADE;
ALTER TABLE ONLY public.job_events
    ADD CONSTRAINT job_events_job_id_fkey FOREIGN KEY (job_id) REFERENCES public.jobs(id) ON DELETE CASCADE;
ALTER TABLE ONLY public.job_labels
    ADD CONSTRAINT job_labels_job_id_fkey FOREIGN KEY (job_id) REFERENCES public.jobs(id) ON DELETE CASCADE;
ALTER TABLE ONLY public.job_workers
    ADD CONSTRAINT job_workers_job_id_fkey FOREIGN KEY (job_id) REFERENCES public.jobs(id) ON DELETE CASCADE;
