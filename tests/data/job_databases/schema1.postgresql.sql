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
    progress text
);
CREATE TABLE public.job_labels (
    job_id character varying(40) NOT NULL,
    name character varying(128) NOT NULL,
    value character varying(512) NOT NULL
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
    finished_at double precision
);
CREATE TABLE public.reshard_meta (
    name character varying(64) NOT NULL,
    value text NOT NULL
);
INSERT INTO public.idempotency_keys VALUES ('a-key', 'ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff', '06b550ef880f7b5c3c55058707f23e19', 1795465477.834426, 'job_ik33b2xomxgwfmt46ipvnbww');
INSERT INTO public.idempotency_keys VALUES ('a-held-key', 'eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee', 'c37dbb9e49fb083d3cf5e4018d28ccfc', 1795465477.841186, NULL);
INSERT INTO public.job_events VALUES ('job_hqqh3fwmgh6jz4qrosstcerx', 1, 1795465447.828246, 'state', 'QUEUED', NULL);
INSERT INTO public.job_events VALUES ('job_ik33b2xomxgwfmt46ipvnbww', 1, 1795465447.837937, 'state', 'QUEUED', NULL);
INSERT INTO public.job_events VALUES ('job_367qtafeptdtmxlicjnke5bi', 1, 1795465447.843724, 'state', 'QUEUED', NULL);
INSERT INTO public.job_events VALUES ('job_367qtafeptdtmxlicjnke5bi', 2, 1795465447.853522, 'state', 'PLANNING', NULL);
INSERT INTO public.job_events VALUES ('job_367qtafeptdtmxlicjnke5bi', 3, 1795465447.857718, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO public.job_events VALUES ('job_367qtafeptdtmxlicjnke5bi', 4, 1795465447.862871, 'state', 'QUEUED', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO public.job_events VALUES ('job_u2k3ubvobdgfoz5ptksnnn54', 1, 1795465447.865331, 'state', 'QUEUED', NULL);
INSERT INTO public.job_events VALUES ('job_u2k3ubvobdgfoz5ptksnnn54', 2, 1795465447.86987, 'state', 'PLANNING', NULL);
INSERT INTO public.job_events VALUES ('job_u2k3ubvobdgfoz5ptksnnn54', 3, 1795465447.871814, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO public.job_events VALUES ('job_u2k3ubvobdgfoz5ptksnnn54', 4, 1795465447.875708, 'state', 'QUEUED', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO public.job_events VALUES ('job_ixbyi4xw6zznhhyqw4cciji5', 1, 1795465447.877664, 'state', 'QUEUED', NULL);
INSERT INTO public.job_events VALUES ('job_ixbyi4xw6zznhhyqw4cciji5', 2, 1795465447.881931, 'state', 'PLANNING', NULL);
INSERT INTO public.job_events VALUES ('job_r6s4acwllvifqx6bohdfvofa', 1, 1795465447.883952, 'state', 'QUEUED', NULL);
INSERT INTO public.job_events VALUES ('job_r6s4acwllvifqx6bohdfvofa', 2, 1795465447.887962, 'state', 'PLANNING', NULL);
INSERT INTO public.job_events VALUES ('job_r6s4acwllvifqx6bohdfvofa', 3, 1795465447.889743, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO public.job_events VALUES ('job_35mlq2zearr36mzjlv3yewxp', 1, 1795465447.891466, 'state', 'QUEUED', NULL);
INSERT INTO public.job_events VALUES ('job_35mlq2zearr36mzjlv3yewxp', 2, 1795465447.895445, 'state', 'PLANNING', NULL);
INSERT INTO public.job_events VALUES ('job_35mlq2zearr36mzjlv3yewxp', 3, 1795465447.897247, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO public.job_events VALUES ('job_35mlq2zearr36mzjlv3yewxp', 4, 1795465447.898914, 'state', 'VERIFYING', '{"phase":"verifying","bytes_done":2,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO public.job_events VALUES ('job_tbkavntcxhnsqv67vs437q64', 1, 1795465447.900624, 'state', 'QUEUED', NULL);
INSERT INTO public.job_events VALUES ('job_tbkavntcxhnsqv67vs437q64', 2, 1795465447.904588, 'state', 'PLANNING', NULL);
INSERT INTO public.job_events VALUES ('job_tbkavntcxhnsqv67vs437q64', 3, 1795465447.90641, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO public.job_events VALUES ('job_tbkavntcxhnsqv67vs437q64', 4, 1795465447.908028, 'state', 'VERIFYING', '{"phase":"verifying","bytes_done":2,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO public.job_events VALUES ('job_tbkavntcxhnsqv67vs437q64', 5, 1795465447.911328, 'state', 'SUCCEEDED', '{"phase":"verifying","bytes_done":2,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO public.job_events VALUES ('job_mpgbqslm7qzjyhncun2euq4o', 1, 1795465447.913133, 'state', 'QUEUED', NULL);
INSERT INTO public.job_events VALUES ('job_mpgbqslm7qzjyhncun2euq4o', 2, 1795465447.916888, 'state', 'PLANNING', NULL);
INSERT INTO public.job_events VALUES ('job_mpgbqslm7qzjyhncun2euq4o', 3, 1795465447.918668, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO public.job_events VALUES ('job_mpgbqslm7qzjyhncun2euq4o', 4, 1795465447.921655, 'state', 'FAILED', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO public.job_events VALUES ('job_oiep2vbutizs6z6322c2gc7b', 1, 1795465447.923412, 'state', 'QUEUED', NULL);
INSERT INTO public.job_events VALUES ('job_oiep2vbutizs6z6322c2gc7b', 2, 1795465447.927235, 'state', 'PLANNING', NULL);
INSERT INTO public.job_events VALUES ('job_oiep2vbutizs6z6322c2gc7b', 3, 1795465447.928791, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO public.job_events VALUES ('job_oiep2vbutizs6z6322c2gc7b', 4, 1795465447.930449, 'state', 'FAILED', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO public.job_events VALUES ('job_q4eazbsk6faletqxgrp4il6v', 1, 1795465447.932115, 'state', 'QUEUED', NULL);
INSERT INTO public.job_events VALUES ('job_q4eazbsk6faletqxgrp4il6v', 2, 1795465447.935731, 'state', 'PLANNING', NULL);
INSERT INTO public.job_events VALUES ('job_q4eazbsk6faletqxgrp4il6v', 3, 1795465447.937499, 'state', 'FAILED', NULL);
INSERT INTO public.job_events VALUES ('job_aemoritj66gytxf5nsakldwh', 1, 1795465447.939088, 'state', 'QUEUED', NULL);
INSERT INTO public.job_events VALUES ('job_aemoritj66gytxf5nsakldwh', 2, 1795465447.942627, 'state', 'PLANNING', NULL);
INSERT INTO public.job_events VALUES ('job_aemoritj66gytxf5nsakldwh', 3, 1795465447.944327, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO public.job_events VALUES ('job_aemoritj66gytxf5nsakldwh', 4, 1795465447.950825, 'state', 'FAILED', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO public.job_events VALUES ('job_kojlln6hfd66v2so24mmzoly', 1, 1795465447.952573, 'state', 'QUEUED', NULL);
INSERT INTO public.job_events VALUES ('job_kojlln6hfd66v2so24mmzoly', 2, 1795465447.954959, 'state', 'CANCELLED', NULL);
INSERT INTO public.job_events VALUES ('job_zffewxlz2s6lm53zz6afsj2h', 1, 1795465447.9575, 'state', 'QUEUED', NULL);
INSERT INTO public.job_events VALUES ('job_zffewxlz2s6lm53zz6afsj2h', 2, 1795465447.960754, 'state', 'PLANNING', NULL);
INSERT INTO public.job_events VALUES ('job_zffewxlz2s6lm53zz6afsj2h', 3, 1795465447.962449, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO public.job_events VALUES ('job_zffewxlz2s6lm53zz6afsj2h', 4, 1795465447.967061, 'state', 'CANCELLING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO public.job_events VALUES ('job_zffewxlz2s6lm53zz6afsj2h', 5, 1795465447.96922, 'state', 'CANCELLED', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO public.job_events VALUES ('job_n74z3iwqzijt73rqlqdabdzl', 1, 1795465447.970887, 'state', 'QUEUED', NULL);
INSERT INTO public.job_events VALUES ('job_n74z3iwqzijt73rqlqdabdzl', 2, 1795465447.973811, 'state', 'PLANNING', NULL);
INSERT INTO public.job_events VALUES ('job_n74z3iwqzijt73rqlqdabdzl', 3, 1795465447.975372, 'state', 'RUNNING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO public.job_events VALUES ('job_n74z3iwqzijt73rqlqdabdzl', 4, 1795465447.977881, 'state', 'CANCELLING', '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO public.job_events VALUES ('job_igjcdr2f5z6bekw57j7lupmx', 1, 1795465447.981962, 'state', 'QUEUED', NULL);
INSERT INTO public.job_events VALUES ('job_ok7pprjwhndkiv4nkfdlb45b', 1, 1795465447.985833, 'state', 'QUEUED', NULL);
INSERT INTO public.job_labels VALUES ('job_hqqh3fwmgh6jz4qrosstcerx', 'case', 'queued');
INSERT INTO public.job_labels VALUES ('job_hqqh3fwmgh6jz4qrosstcerx', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_ik33b2xomxgwfmt46ipvnbww', 'case', 'with-a-key');
INSERT INTO public.job_labels VALUES ('job_ik33b2xomxgwfmt46ipvnbww', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_367qtafeptdtmxlicjnke5bi', 'case', 'released');
INSERT INTO public.job_labels VALUES ('job_367qtafeptdtmxlicjnke5bi', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_u2k3ubvobdgfoz5ptksnnn54', 'case', 'to-be-tried-again');
INSERT INTO public.job_labels VALUES ('job_u2k3ubvobdgfoz5ptksnnn54', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_ixbyi4xw6zznhhyqw4cciji5', 'case', 'planning');
INSERT INTO public.job_labels VALUES ('job_ixbyi4xw6zznhhyqw4cciji5', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_r6s4acwllvifqx6bohdfvofa', 'case', 'running');
INSERT INTO public.job_labels VALUES ('job_r6s4acwllvifqx6bohdfvofa', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_35mlq2zearr36mzjlv3yewxp', 'case', 'verifying');
INSERT INTO public.job_labels VALUES ('job_35mlq2zearr36mzjlv3yewxp', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_tbkavntcxhnsqv67vs437q64', 'case', 'succeeded');
INSERT INTO public.job_labels VALUES ('job_tbkavntcxhnsqv67vs437q64', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_mpgbqslm7qzjyhncun2euq4o', 'case', 'failed');
INSERT INTO public.job_labels VALUES ('job_mpgbqslm7qzjyhncun2euq4o', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_oiep2vbutizs6z6322c2gc7b', 'case', 'failed-and-unwanted');
INSERT INTO public.job_labels VALUES ('job_oiep2vbutizs6z6322c2gc7b', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_q4eazbsk6faletqxgrp4il6v', 'case', 'failed-at-once');
INSERT INTO public.job_labels VALUES ('job_q4eazbsk6faletqxgrp4il6v', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_aemoritj66gytxf5nsakldwh', 'case', 'exhausted');
INSERT INTO public.job_labels VALUES ('job_aemoritj66gytxf5nsakldwh', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_kojlln6hfd66v2so24mmzoly', 'case', 'cancelled-before');
INSERT INTO public.job_labels VALUES ('job_kojlln6hfd66v2so24mmzoly', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_zffewxlz2s6lm53zz6afsj2h', 'case', 'cancelled');
INSERT INTO public.job_labels VALUES ('job_zffewxlz2s6lm53zz6afsj2h', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_n74z3iwqzijt73rqlqdabdzl', 'case', 'cancelling');
INSERT INTO public.job_labels VALUES ('job_n74z3iwqzijt73rqlqdabdzl', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_igjcdr2f5z6bekw57j7lupmx', 'case', 'a-plan');
INSERT INTO public.job_labels VALUES ('job_igjcdr2f5z6bekw57j7lupmx', 'team', 'x');
INSERT INTO public.job_labels VALUES ('job_ok7pprjwhndkiv4nkfdlb45b', 'case', 'planned');
INSERT INTO public.jobs VALUES ('job_hqqh3fwmgh6jz4qrosstcerx', 'convert', 'QUEUED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/queued","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}', '/frozen/queued', 0, 3, 0, NULL, NULL, NULL, 0, 0, 0, NULL, NULL, NULL, NULL, 1, 1795465447.8236, NULL, NULL);
INSERT INTO public.jobs VALUES ('job_ik33b2xomxgwfmt46ipvnbww', 'convert', 'QUEUED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/with-a-key","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}', '/frozen/with-a-key', 0, 3, 0, NULL, NULL, NULL, 0, 0, 0, NULL, NULL, NULL, NULL, 1, 1795465447.836644, NULL, NULL);
INSERT INTO public.jobs VALUES ('job_367qtafeptdtmxlicjnke5bi', 'convert', 'QUEUED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/released","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}', '/frozen/released', 1, 3, 1, NULL, NULL, NULL, 0, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}', NULL, NULL, NULL, 4, 1795465447.842569, 1795465447.852236, NULL);
INSERT INTO public.jobs VALUES ('job_u2k3ubvobdgfoz5ptksnnn54', 'convert', 'QUEUED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/to-be-tried-again","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}', '/frozen/to-be-tried-again', 1, 3, 0, NULL, NULL, NULL, 1795465447.884714, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}', NULL, '{"type":"urn:reshard:error:storage.unavailable","title":"The store timed out or throttled.","status":503,"detail":"the store did not answer","code":"storage.unavailable","fix":"look at the store","retryable":true,"details":{}}', NULL, 4, 1795465447.864393, 1795465447.869233, NULL);
INSERT INTO public.jobs VALUES ('job_ixbyi4xw6zznhhyqw4cciji5', 'convert', 'PLANNING', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/planning","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}', '/frozen/planning', 1, 3, 0, '8a1b5370525037a18a4306b53f724ba5', 'old-worker', 1795465507.88135, 0, 0, 0, NULL, NULL, NULL, NULL, 2, 1795465447.876879, 1795465447.881351, NULL);
INSERT INTO public.jobs VALUES ('job_r6s4acwllvifqx6bohdfvofa', 'convert', 'RUNNING', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/running","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}', '/frozen/running', 1, 3, 0, 'd3d922a9c27b26ad78e594131d27e48d', 'old-worker', 1795465507.889281, 0, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}', NULL, NULL, NULL, 3, 1795465447.883164, 1795465447.887308, NULL);
INSERT INTO public.jobs VALUES ('job_35mlq2zearr36mzjlv3yewxp', 'convert', 'VERIFYING', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/verifying","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}', '/frozen/verifying', 1, 3, 0, '0f316803ee7fb004558b443489385746', 'old-worker', 1795465507.898463, 0, 0, 0, '{"phase":"verifying","bytes_done":2,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}', NULL, NULL, NULL, 4, 1795465447.890767, 1795465447.894903, NULL);
INSERT INTO public.jobs VALUES ('job_n74z3iwqzijt73rqlqdabdzl', 'convert', 'CANCELLING', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/cancelling","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}', '/frozen/cancelling', 1, 3, 0, 'e1be4da93a2340fa923582dc17a0c4ec', 'old-worker', 1795465507.974928, 0, 0, 1, '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}', NULL, NULL, NULL, 4, 1795465447.970155, 1795465447.97341, NULL);
INSERT INTO public.jobs VALUES ('job_igjcdr2f5z6bekw57j7lupmx', 'convert', 'QUEUED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/a-plan","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}', '/frozen/a-plan', 0, 3, 0, NULL, NULL, NULL, 0, 0, 0, NULL, NULL, NULL, NULL, 1, 1795465447.979289, NULL, NULL);
INSERT INTO public.jobs VALUES ('job_ok7pprjwhndkiv4nkfdlb45b', 'plan', 'QUEUED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/a-plan","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}', '', 0, 3, 0, NULL, NULL, NULL, 0, 0, 0, NULL, NULL, NULL, NULL, 1, 1795465447.98509, NULL, NULL);
INSERT INTO public.jobs VALUES ('job_tbkavntcxhnsqv67vs437q64', 'convert', 'SUCCEEDED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/succeeded","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}', '/frozen/succeeded', 1, 3, 0, 'c6db3e93331e10f78c9e7a0cdef2a686', 'old-worker', NULL, 0, 0, 0, '{"phase":"verifying","bytes_done":2,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}', 'd', NULL, '{"schema_version":1,"target":"/frozen/succeeded","to":"universal","files":[],"read_bytes":1,"write_bytes":2,"server_copied_bytes":0,"resumed_bytes":0,"seconds":{},"plan_digest":"d","already_done":false,"verification":"default","warnings":[],"not_carried":[],"casts":[]}', 5, 1795465447.899921, 1795465447.904104, 1795465447.910221);
INSERT INTO public.jobs VALUES ('job_mpgbqslm7qzjyhncun2euq4o', 'convert', 'FAILED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/failed","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}', '/frozen/failed', 1, 3, 0, '0d764ac5d8ad50676deedc51a2e38dd5', 'old-worker', NULL, 0, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}', NULL, '{"type":"urn:reshard:error:checkpoint.incomplete","title":"Files or parts of tensors are missing.","status":422,"detail":"rank 1 is missing","code":"checkpoint.incomplete","fix":"copy it again","retryable":false,"details":{}}', NULL, 4, 1795465447.912367, 1795465447.916411, 1795465447.920854);
INSERT INTO public.jobs VALUES ('job_oiep2vbutizs6z6322c2gc7b', 'convert', 'FAILED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/failed-and-unwanted","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}', '/frozen/failed-and-unwanted', 1, 3, 0, '5266243a14fa9353580952376fd602ac', 'old-worker', NULL, 0, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}', NULL, '{"type":"urn:reshard:error:checkpoint.incomplete","title":"Files or parts of tensors are missing.","status":422,"detail":"rank 1 is missing","code":"checkpoint.incomplete","fix":"copy it again","retryable":false,"details":{}}', NULL, 4, 1795465447.922678, 1795465447.926719, 1795465447.929917);
INSERT INTO public.jobs VALUES ('job_q4eazbsk6faletqxgrp4il6v', 'convert', 'FAILED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/failed-at-once","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}', '/frozen/failed-at-once', 1, 3, 0, '819b239228d0ea705b5a57483f4ee85e', 'old-worker', NULL, 0, 0, 0, NULL, NULL, '{"type":"urn:reshard:error:checkpoint.incomplete","title":"Files or parts of tensors are missing.","status":422,"detail":"rank 1 is missing","code":"checkpoint.incomplete","fix":"copy it again","retryable":false,"details":{}}', NULL, 3, 1795465447.931453, 1795465447.935233, 1795465447.936994);
INSERT INTO public.jobs VALUES ('job_aemoritj66gytxf5nsakldwh', 'convert', 'FAILED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/exhausted","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}', '/frozen/exhausted', 1, 1, 0, '3488ad733df95dadb8b6584ec0ff6fcb', 'old-worker', NULL, 0, 0, 0, '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}', NULL, '{"type":"urn:reshard:error:job.attempts_exhausted","title":"Every allowed attempt was lost.","status":500,"detail":"1 attempts were lost; the last one: the store did not answer","code":"job.attempts_exhausted","fix":"look at the worker''s log for the cause, then submit the job again: finished work is kept","retryable":false,"details":{"attempts":1,"last_error":{"type":"urn:reshard:error:storage.unavailable","title":"The store timed out or throttled.","status":503,"detail":"the store did not answer","code":"storage.unavailable","fix":"look at the store","retryable":true,"details":{}}}}', NULL, 4, 1795465447.938435, 1795465447.941974, 1795465447.950226);
INSERT INTO public.jobs VALUES ('job_kojlln6hfd66v2so24mmzoly', 'convert', 'CANCELLED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/cancelled-before","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}', '/frozen/cancelled-before', 0, 3, 0, NULL, NULL, NULL, 0, 0, 1, NULL, NULL, NULL, NULL, 2, 1795465447.951894, NULL, 1795465447.9544);
INSERT INTO public.jobs VALUES ('job_zffewxlz2s6lm53zz6afsj2h', 'convert', 'CANCELLED', '{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/cancelled","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}', '/frozen/cancelled', 1, 3, 0, 'ff9f10cccd50f72a0e6ccda08110dc4e', 'old-worker', NULL, 0, 0, 1, '{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}', NULL, NULL, NULL, 5, 1795465447.956854, 1795465447.960277, 1795465447.968751);
INSERT INTO public.reshard_meta VALUES ('schema_version', '1');
ALTER TABLE ONLY public.idempotency_keys
    ADD CONSTRAINT idempotency_keys_pkey PRIMARY KEY (key);
ALTER TABLE ONLY public.job_events
    ADD CONSTRAINT job_events_pkey PRIMARY KEY (job_id, seq);
ALTER TABLE ONLY public.job_labels
    ADD CONSTRAINT job_labels_pkey PRIMARY KEY (job_id, name);
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
