BEGIN TRANSACTION;
CREATE TABLE audit_log (
	id INTEGER NOT NULL, 
	at FLOAT NOT NULL, 
	tenant VARCHAR(64) NOT NULL, 
	actor VARCHAR(200) NOT NULL, 
	address VARCHAR(64) NOT NULL, 
	action VARCHAR(64) NOT NULL, 
	object VARCHAR(200) NOT NULL, 
	outcome VARCHAR(64) NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE idempotency_keys (
	tenant VARCHAR(64) DEFAULT 'default' NOT NULL, 
	"key" VARCHAR(255) NOT NULL, 
	fingerprint VARCHAR(64) NOT NULL, 
	holder VARCHAR(64) NOT NULL, 
	held_until FLOAT NOT NULL, 
	job_id VARCHAR(40), 
	PRIMARY KEY (tenant, "key"), 
	FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "idempotency_keys" VALUES('default','a-key','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','80c9a82d72fea3e22254834ca3a266ec',1.79564132693900942801e+09,'job_jgokfm4muoboslwrr6cewkcn');
INSERT INTO "idempotency_keys" VALUES('default','a-held-key','eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee','26bb0a3d7f7690b200604d60628c2b9f',1.79564132698600172999e+09,NULL);
CREATE TABLE job_events (
	job_id VARCHAR(40) NOT NULL, 
	seq INTEGER NOT NULL, 
	at FLOAT NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	progress TEXT, 
	worker TEXT, 
	PRIMARY KEY (job_id, seq), 
	FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "job_events" VALUES('job_kkg4atb5ihhnfouwbs3no5es',1,1.79564129690300083161e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_jgokfm4muoboslwrr6cewkcn',1,1.7956412969600110054e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_heijj4f32frv2uer2np3a7yx',1,1.79564129700700330738e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_heijj4f32frv2uer2np3a7yx',2,1.79564129707000851628e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_heijj4f32frv2uer2np3a7yx',3,1.79564129714299154281e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_heijj4f32frv2uer2np3a7yx',4,1.7956412971619815826e+09,'state','QUEUED','{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_yxscb7ewsayazqntwmau44yy',1,1.79564129716898202892e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_yxscb7ewsayazqntwmau44yy',2,1.79564129721400284772e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_yxscb7ewsayazqntwmau44yy',3,1.79564129725101733208e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_yxscb7ewsayazqntwmau44yy',4,1.79564129727000737187e+09,'state','QUEUED','{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_ikfcigza4wnlwio4zek5qlrv',1,1.79564129728400850294e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_ikfcigza4wnlwio4zek5qlrv',2,1.79564129732098293297e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_yskyuui5tco6b6msp5w6wq56',1,1.7956412973450019359e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_yskyuui5tco6b6msp5w6wq56',2,1.79564129736499786382e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_yskyuui5tco6b6msp5w6wq56',3,1.79564129740000057219e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_y7hs32cmlajc4jwevxq2wqnq',1,1.79564129741199016566e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_y7hs32cmlajc4jwevxq2wqnq',2,1.79564129763701415057e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_y7hs32cmlajc4jwevxq2wqnq',3,1.79564129766698789593e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_y7hs32cmlajc4jwevxq2wqnq',4,1.79564129767801165579e+09,'state','VERIFYING','{"phase":"verifying","bytes_done":2,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":false}',NULL);
INSERT INTO "job_events" VALUES('job_zfxaqaarjbfkspoqxvrs5pia',1,1.79564129768300056455e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_zfxaqaarjbfkspoqxvrs5pia',2,1.79564129770798540115e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_zfxaqaarjbfkspoqxvrs5pia',3,1.7956412977540121079e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_zfxaqaarjbfkspoqxvrs5pia',4,1.79564129776298403743e+09,'state','VERIFYING','{"phase":"verifying","bytes_done":2,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":false}',NULL);
INSERT INTO "job_events" VALUES('job_zfxaqaarjbfkspoqxvrs5pia',5,1.79564129778700327867e+09,'state','SUCCEEDED','{"phase":"verifying","bytes_done":2,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":false}',NULL);
INSERT INTO "job_events" VALUES('job_3b476q5lmccawjlcgxsyw6ar',1,1.7956412978080048561e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_3b476q5lmccawjlcgxsyw6ar',2,1.79564129783801889423e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_3b476q5lmccawjlcgxsyw6ar',3,1795641297.87101,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_3b476q5lmccawjlcgxsyw6ar',4,1795641297.89,'state','FAILED','{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_bbdlxkwjx6jisqo2bd6rw3c7',1,1.79564129790798425673e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_bbdlxkwjx6jisqo2bd6rw3c7',2,1.79564129793498063083e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_bbdlxkwjx6jisqo2bd6rw3c7',3,1.79564129795501685148e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_bbdlxkwjx6jisqo2bd6rw3c7',4,1.79564129796499466896e+09,'state','FAILED','{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_cvu3g4gwxpifnnb72yvv6au3',1,1.79564129798100733759e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_cvu3g4gwxpifnnb72yvv6au3',2,1.79564129799999737738e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_cvu3g4gwxpifnnb72yvv6au3',3,1.79564129801601028444e+09,'state','FAILED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_t6jjbbvhalqbdghbmpnygpvt',1,1.79564129802301073075e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_t6jjbbvhalqbdghbmpnygpvt',2,1.79564129803500032419e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_t6jjbbvhalqbdghbmpnygpvt',3,1.79564129805101299281e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_t6jjbbvhalqbdghbmpnygpvt',4,1.79564129806199669842e+09,'state','FAILED','{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_ng34c4bgkq4gnnstoejeadad',1,1.79564129807201480868e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_ng34c4bgkq4gnnstoejeadad',2,1.79564129808798742297e+09,'state','CANCELLED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_h5lr25ushfk54fi7qrskhxuu',1,1.79564129810601186753e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_h5lr25ushfk54fi7qrskhxuu',2,1.79564129812399601937e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_h5lr25ushfk54fi7qrskhxuu',3,1.79564129814101457595e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_h5lr25ushfk54fi7qrskhxuu',4,1.79564129815501570706e+09,'state','CANCELLING','{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_h5lr25ushfk54fi7qrskhxuu',5,1.79564129817299985886e+09,'state','CANCELLED','{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_qaxwzwrxicao3dixmyliyqie',1,1.79564129818201208112e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_qaxwzwrxicao3dixmyliyqie',2,1.79564129819500732428e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_qaxwzwrxicao3dixmyliyqie',3,1.79564129821500325203e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_qaxwzwrxicao3dixmyliyqie',4,1.79564129821898651128e+09,'state','CANCELLING','{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_xdyzxusy62apd25rcqus5f7j',1,1.79564129823600506785e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_ia6zvv2uzm7jx66vkalke324',1,1.79564129825499510769e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_3mqu6k2g5goosniavr6qycda',1,1.795641298263001442e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_3mqu6k2g5goosniavr6qycda',2,1.79564129828199148175e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_3mqu6k2g5goosniavr6qycda',3,1.79564129830701637267e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_3mqu6k2g5goosniavr6qycda',4,1.79564129835400867465e+09,'worker','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','{"worker":"helper-1","role":"helper","attempt":1,"joined_at":"2026-11-25T21:14:58.342019Z","left_at":null,"share":null}');
INSERT INTO "job_events" VALUES('job_3mqu6k2g5goosniavr6qycda',5,1.79564129838100528715e+09,'worker','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','{"worker":"helper-2","role":"helper","attempt":1,"joined_at":"2026-11-25T21:14:58.374005Z","left_at":null,"share":null}');
INSERT INTO "job_events" VALUES('job_3mqu6k2g5goosniavr6qycda',6,1.79564129840401864052e+09,'worker','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','{"worker":"helper-1","role":"helper","attempt":1,"joined_at":"2026-11-25T21:14:58.342019Z","left_at":"2026-11-25T21:14:58.403013Z","share":{"runs":2,"takeovers":0,"splits":0,"epochs_lost":0,"units":5,"write_bytes":99}}');
INSERT INTO "job_events" VALUES('job_gzoxlbx5l752l4ihfax5ivcx',1,1.79564129843499803535e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_gzoxlbx5l752l4ihfax5ivcx',2,1.79564129845998287195e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_gzoxlbx5l752l4ihfax5ivcx',3,1.79564129848701953891e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_gzoxlbx5l752l4ihfax5ivcx',4,1.79564129850999259943e+09,'state','QUEUED','{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_4hd6codwe2ol7uxrz73gm7o4',1,1.79564129853900074961e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_4hd6codwe2ol7uxrz73gm7o4',2,1.79564129856800889966e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_4hd6codwe2ol7uxrz73gm7o4',3,1.79564129860699462888e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_4hd6codwe2ol7uxrz73gm7o4',4,1.79564129862099599839e+09,'state','FAILED','{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_4hd6codwe2ol7uxrz73gm7o4',5,1.79564129864199757569e+09,'state','QUEUED','{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
CREATE TABLE job_labels (
	job_id VARCHAR(40) NOT NULL, 
	name VARCHAR(128) NOT NULL, 
	value VARCHAR(512) NOT NULL, 
	PRIMARY KEY (job_id, name), 
	FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "job_labels" VALUES('job_kkg4atb5ihhnfouwbs3no5es','case','queued');
INSERT INTO "job_labels" VALUES('job_kkg4atb5ihhnfouwbs3no5es','team','x');
INSERT INTO "job_labels" VALUES('job_jgokfm4muoboslwrr6cewkcn','case','with-a-key');
INSERT INTO "job_labels" VALUES('job_jgokfm4muoboslwrr6cewkcn','team','x');
INSERT INTO "job_labels" VALUES('job_heijj4f32frv2uer2np3a7yx','case','released');
INSERT INTO "job_labels" VALUES('job_heijj4f32frv2uer2np3a7yx','team','x');
INSERT INTO "job_labels" VALUES('job_yxscb7ewsayazqntwmau44yy','case','to-be-tried-again');
INSERT INTO "job_labels" VALUES('job_yxscb7ewsayazqntwmau44yy','team','x');
INSERT INTO "job_labels" VALUES('job_ikfcigza4wnlwio4zek5qlrv','case','planning');
INSERT INTO "job_labels" VALUES('job_ikfcigza4wnlwio4zek5qlrv','team','x');
INSERT INTO "job_labels" VALUES('job_yskyuui5tco6b6msp5w6wq56','case','running');
INSERT INTO "job_labels" VALUES('job_yskyuui5tco6b6msp5w6wq56','team','x');
INSERT INTO "job_labels" VALUES('job_y7hs32cmlajc4jwevxq2wqnq','case','verifying');
INSERT INTO "job_labels" VALUES('job_y7hs32cmlajc4jwevxq2wqnq','team','x');
INSERT INTO "job_labels" VALUES('job_zfxaqaarjbfkspoqxvrs5pia','case','succeeded');
INSERT INTO "job_labels" VALUES('job_zfxaqaarjbfkspoqxvrs5pia','team','x');
INSERT INTO "job_labels" VALUES('job_3b476q5lmccawjlcgxsyw6ar','case','failed');
INSERT INTO "job_labels" VALUES('job_3b476q5lmccawjlcgxsyw6ar','team','x');
INSERT INTO "job_labels" VALUES('job_bbdlxkwjx6jisqo2bd6rw3c7','case','failed-and-unwanted');
INSERT INTO "job_labels" VALUES('job_bbdlxkwjx6jisqo2bd6rw3c7','team','x');
INSERT INTO "job_labels" VALUES('job_cvu3g4gwxpifnnb72yvv6au3','case','failed-at-once');
INSERT INTO "job_labels" VALUES('job_cvu3g4gwxpifnnb72yvv6au3','team','x');
INSERT INTO "job_labels" VALUES('job_t6jjbbvhalqbdghbmpnygpvt','case','exhausted');
INSERT INTO "job_labels" VALUES('job_t6jjbbvhalqbdghbmpnygpvt','team','x');
INSERT INTO "job_labels" VALUES('job_ng34c4bgkq4gnnstoejeadad','case','cancelled-before');
INSERT INTO "job_labels" VALUES('job_ng34c4bgkq4gnnstoejeadad','team','x');
INSERT INTO "job_labels" VALUES('job_h5lr25ushfk54fi7qrskhxuu','case','cancelled');
INSERT INTO "job_labels" VALUES('job_h5lr25ushfk54fi7qrskhxuu','team','x');
INSERT INTO "job_labels" VALUES('job_qaxwzwrxicao3dixmyliyqie','case','cancelling');
INSERT INTO "job_labels" VALUES('job_qaxwzwrxicao3dixmyliyqie','team','x');
INSERT INTO "job_labels" VALUES('job_xdyzxusy62apd25rcqus5f7j','case','a-plan');
INSERT INTO "job_labels" VALUES('job_xdyzxusy62apd25rcqus5f7j','team','x');
INSERT INTO "job_labels" VALUES('job_ia6zvv2uzm7jx66vkalke324','case','planned');
INSERT INTO "job_labels" VALUES('job_3mqu6k2g5goosniavr6qycda','case','shared');
INSERT INTO "job_labels" VALUES('job_3mqu6k2g5goosniavr6qycda','team','x');
INSERT INTO "job_labels" VALUES('job_gzoxlbx5l752l4ihfax5ivcx','case','refused');
INSERT INTO "job_labels" VALUES('job_gzoxlbx5l752l4ihfax5ivcx','team','x');
INSERT INTO "job_labels" VALUES('job_4hd6codwe2ol7uxrz73gm7o4','case','retried');
INSERT INTO "job_labels" VALUES('job_4hd6codwe2ol7uxrz73gm7o4','team','x');
CREATE TABLE job_plans (
	job_id VARCHAR(40) NOT NULL, 
	digest VARCHAR(128) NOT NULL, 
	PRIMARY KEY (job_id, digest), 
	FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "job_plans" VALUES('job_heijj4f32frv2uer2np3a7yx','plan-of-released');
INSERT INTO "job_plans" VALUES('job_yxscb7ewsayazqntwmau44yy','plan-of-to-be-tried-again');
INSERT INTO "job_plans" VALUES('job_yskyuui5tco6b6msp5w6wq56','plan-of-running');
INSERT INTO "job_plans" VALUES('job_y7hs32cmlajc4jwevxq2wqnq','plan-of-verifying');
INSERT INTO "job_plans" VALUES('job_3b476q5lmccawjlcgxsyw6ar','plan-of-failed');
INSERT INTO "job_plans" VALUES('job_bbdlxkwjx6jisqo2bd6rw3c7','plan-of-failed-and-unwanted');
INSERT INTO "job_plans" VALUES('job_t6jjbbvhalqbdghbmpnygpvt','plan-of-exhausted');
INSERT INTO "job_plans" VALUES('job_qaxwzwrxicao3dixmyliyqie','plan-of-cancelling');
INSERT INTO "job_plans" VALUES('job_3mqu6k2g5goosniavr6qycda','plan-of-shared');
INSERT INTO "job_plans" VALUES('job_gzoxlbx5l752l4ihfax5ivcx','plan-of-refused');
INSERT INTO "job_plans" VALUES('job_4hd6codwe2ol7uxrz73gm7o4','plan-of-retried');
CREATE TABLE job_refusals (
	job_id VARCHAR(40) NOT NULL, 
	worker VARCHAR(200) NOT NULL, 
	code VARCHAR(64) NOT NULL, 
	at FLOAT NOT NULL, 
	PRIMARY KEY (job_id, worker), 
	FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "job_refusals" VALUES('job_gzoxlbx5l752l4ihfax5ivcx','old-worker','storage.unavailable',1.79564129849200844763e+09);
CREATE TABLE job_workers (
	job_id VARCHAR(40) NOT NULL, 
	token VARCHAR(64) NOT NULL, 
	worker VARCHAR(200) NOT NULL, 
	role VARCHAR(16) NOT NULL, 
	attempt INTEGER NOT NULL, 
	joined_at FLOAT NOT NULL, 
	lease_until FLOAT, 
	left_at FLOAT, 
	failed INTEGER NOT NULL, 
	runs INTEGER, 
	takeovers INTEGER, 
	splits INTEGER, 
	epochs_lost INTEGER, 
	units INTEGER, 
	write_bytes BIGINT, 
	PRIMARY KEY (job_id, token), 
	FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "job_workers" VALUES('job_heijj4f32frv2uer2np3a7yx','59220e44c7a84f6607a938f49fe06de1','old-worker','owner',1,1795641297.07198,NULL,1.79564129716298723216e+09,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_yxscb7ewsayazqntwmau44yy','2e5759063e269125469d5fcbb10ba420','old-worker','owner',1,1.79564129721500873567e+09,NULL,1.79564129727101325986e+09,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_ikfcigza4wnlwio4zek5qlrv','e32e96c02eca118722123a35d0867c96','old-worker','owner',1,1.7956412973229944706e+09,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_yskyuui5tco6b6msp5w6wq56','1c737d9378d3ac5316f0df597050bb97','old-worker','owner',1,1.79564129736998677249e+09,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_y7hs32cmlajc4jwevxq2wqnq','dcc71b1c252c87fc0b6626a0a40b085b','old-worker','owner',1,1.79564129764498019211e+09,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_zfxaqaarjbfkspoqxvrs5pia','3f650c3087dbfef41484eaa6bb186923','old-worker','owner',1,1.79564129771699762345e+09,NULL,1.79564129778800916675e+09,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_3b476q5lmccawjlcgxsyw6ar','cdfbd709fd0912e3105ce0cb6053f0b5','old-worker','owner',1,1.79564129784200191496e+09,NULL,1795641297.89,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_bbdlxkwjx6jisqo2bd6rw3c7','8d5fa54a6e50448928f20104e9c28569','old-worker','owner',1,1.79564129793598651878e+09,NULL,1.79564129796600055691e+09,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_cvu3g4gwxpifnnb72yvv6au3','d3be3e0e1ffcc7a750418c25f15195c0','old-worker','owner',1,1.79564129799999737738e+09,NULL,1.79564129801601028444e+09,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_t6jjbbvhalqbdghbmpnygpvt','bdb43e79b7ca3e12767262927bf27027','old-worker','owner',1,1.79564129803500032419e+09,NULL,1.79564129806199669842e+09,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_h5lr25ushfk54fi7qrskhxuu','889ffe054872b313e5197f873f1c027a','old-worker','owner',1,1.79564129812399601937e+09,NULL,1.79564129817299985886e+09,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_qaxwzwrxicao3dixmyliyqie','cbe50e47f87b504cfe70d14b9185be0c','old-worker','owner',1,1.79564129819500732428e+09,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_3mqu6k2g5goosniavr6qycda','8c1b0b675a728c5b567e900dc2e16b1e','old-worker','owner',1,1.79564129828299736974e+09,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_3mqu6k2g5goosniavr6qycda','1eecc46f8ff915147f7a82a9b98e5019','helper-1','helper',1,1.79564129834201931948e+09,1.79564135834201931956e+09,1.79564129840301275257e+09,0,2,0,0,0,5,99);
INSERT INTO "job_workers" VALUES('job_3mqu6k2g5goosniavr6qycda','21437be3679f536c960ff891d9e23494','helper-2','helper',1,1.79564129837400460239e+09,1.79564135837400460238e+09,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_gzoxlbx5l752l4ihfax5ivcx','1424b73d051a4d1b150a17f42bab529f','old-worker','owner',1,1.79564129846899509434e+09,NULL,1.79564129850999259943e+09,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_4hd6codwe2ol7uxrz73gm7o4','7942ae1f8ee66343bd7845ab063bbf98','old-worker','owner',1,1.7956412985690145493e+09,NULL,1.79564129862099599839e+09,0,NULL,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE jobs (
	id VARCHAR(40) NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	request TEXT NOT NULL, 
	target TEXT NOT NULL, 
	attempt INTEGER NOT NULL, 
	max_attempts INTEGER NOT NULL, 
	releases INTEGER NOT NULL, 
	owner VARCHAR(64), 
	worker VARCHAR(200), 
	lease_until FLOAT, 
	not_before FLOAT NOT NULL, 
	rung_at FLOAT NOT NULL, 
	cancel_requested INTEGER NOT NULL, 
	progress TEXT, 
	plan_digest VARCHAR(128), 
	error TEXT, 
	result TEXT, 
	last_seq INTEGER NOT NULL, 
	created_at FLOAT NOT NULL, 
	started_at FLOAT, 
	finished_at FLOAT, 
	priority INTEGER DEFAULT '0' NOT NULL, 
	max_workers INTEGER DEFAULT '0' NOT NULL, 
	takes_workers INTEGER DEFAULT '0' NOT NULL, 
	retries INTEGER DEFAULT '0' NOT NULL, 
	discard_at FLOAT, 
	discard_asked INTEGER DEFAULT '0' NOT NULL, 
	discard_tries INTEGER DEFAULT '0' NOT NULL, 
	tenant VARCHAR(64) DEFAULT 'default' NOT NULL, 
	given_id VARCHAR(40), 
	planned_bytes BIGINT DEFAULT '0' NOT NULL, 
	traceparent VARCHAR(55), 
	checked INTEGER DEFAULT '0' NOT NULL, 
	source TEXT, 
	brief TEXT, 
	PRIMARY KEY (id)
);
INSERT INTO "jobs" VALUES('job_kkg4atb5ihhnfouwbs3no5es','convert','QUEUED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/queued","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}','/frozen/queued',0,3,0,NULL,NULL,NULL,0.0,0.0,0,NULL,NULL,NULL,NULL,1,1.79564129689201712608e+09,NULL,NULL,0,0,0,0,NULL,0,0,'default',NULL,0,NULL,0,'/frozen/source',NULL);
INSERT INTO "jobs" VALUES('job_jgokfm4muoboslwrr6cewkcn','convert','QUEUED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/with-a-key","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}','/frozen/with-a-key',0,3,0,NULL,NULL,NULL,0.0,0.0,0,NULL,NULL,NULL,NULL,1,1.79564129695900535584e+09,NULL,NULL,0,0,0,0,NULL,0,0,'default',NULL,0,NULL,0,'/frozen/source',NULL);
INSERT INTO "jobs" VALUES('job_heijj4f32frv2uer2np3a7yx','convert','QUEUED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/released","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}','/frozen/released',1,3,1,NULL,NULL,NULL,0.0,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','plan-of-released',NULL,NULL,4,1.79564129700599765782e+09,1.79564129706200218197e+09,NULL,0,0,1,0,NULL,0,0,'default',NULL,0,NULL,1,'/frozen/source',NULL);
INSERT INTO "jobs" VALUES('job_yxscb7ewsayazqntwmau44yy','convert','QUEUED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/to-be-tried-again","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}','/frozen/to-be-tried-again',1,3,0,NULL,NULL,NULL,1.79564129726998925216e+09,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','plan-of-to-be-tried-again','{"type":"urn:reshard:error:storage.unavailable","title":"The store timed out or throttled.","status":503,"detail":"the store did not answer","code":"storage.unavailable","fix":"look at the store","retryable":true,"details":{}}',NULL,4,1.79564129716801643369e+09,1.79564129720800828935e+09,NULL,0,0,1,0,NULL,0,0,'default',NULL,0,NULL,1,'/frozen/source',NULL);
INSERT INTO "jobs" VALUES('job_ikfcigza4wnlwio4zek5qlrv','convert','PLANNING','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/planning","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}','/frozen/planning',1,3,0,'e32e96c02eca118722123a35d0867c96','old-worker',1.79564135731201076511e+09,0.0,0.0,0,NULL,NULL,NULL,NULL,2,1.79564129728199696543e+09,1.79564129731201076504e+09,NULL,0,0,0,0,NULL,0,0,'default',NULL,0,NULL,0,'/frozen/source',NULL);
INSERT INTO "jobs" VALUES('job_yskyuui5tco6b6msp5w6wq56','convert','RUNNING','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/running","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}','/frozen/running',1,3,0,'1c737d9378d3ac5316f0df597050bb97','old-worker',1.79564135739899492262e+09,0.0,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','plan-of-running',NULL,NULL,3,1.79564129734001302722e+09,1.79564129736298608774e+09,NULL,0,0,1,0,NULL,0,0,'default',NULL,0,NULL,1,'/frozen/source',NULL);
INSERT INTO "jobs" VALUES('job_y7hs32cmlajc4jwevxq2wqnq','convert','VERIFYING','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/verifying","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}','/frozen/verifying',1,3,0,'dcc71b1c252c87fc0b6626a0a40b085b','old-worker',1.79564135767700576787e+09,0.0,0.0,0,'{"phase":"verifying","bytes_done":2,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":false}','plan-of-verifying',NULL,NULL,4,1.79564129741098427771e+09,1.79564129763299083712e+09,NULL,0,0,0,0,NULL,0,0,'default',NULL,0,NULL,1,'/frozen/source',NULL);
INSERT INTO "jobs" VALUES('job_zfxaqaarjbfkspoqxvrs5pia','convert','SUCCEEDED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/succeeded","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}','/frozen/succeeded',1,3,0,'3f650c3087dbfef41484eaa6bb186923','old-worker',NULL,0.0,0.0,0,'{"phase":"verifying","bytes_done":2,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":false}','d',NULL,'{"schema_version":1,"target":"/frozen/succeeded","to":"universal","files":[],"read_bytes":1,"write_bytes":2,"server_copied_bytes":0,"resumed_bytes":0,"seconds":{},"plan_digest":"d","already_done":false,"verification":"default","warnings":[],"not_carried":[],"casts":[],"share":null}',5,1.79564129768300056455e+09,1.79564129770701980592e+09,1.79564129778499150273e+09,0,0,0,0,NULL,0,0,'default',NULL,0,NULL,1,'/frozen/source','{"schema_version":1,"target":"/frozen/succeeded","to":"universal","files":[],"read_bytes":1,"write_bytes":2,"server_copied_bytes":0,"resumed_bytes":0,"seconds":{},"plan_digest":"d","already_done":false,"verification":"default","warnings":[],"not_carried":[],"casts":[],"share":null}');
INSERT INTO "jobs" VALUES('job_3b476q5lmccawjlcgxsyw6ar','convert','FAILED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/failed","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}','/frozen/failed',1,3,0,'cdfbd709fd0912e3105ce0cb6053f0b5','old-worker',NULL,0.0,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','plan-of-failed','{"type":"urn:reshard:error:checkpoint.incomplete","title":"Files or parts of tensors are missing.","status":422,"detail":"rank 1 is missing","code":"checkpoint.incomplete","fix":"copy it again","retryable":false,"details":{}}',NULL,4,1.79564129780699920655e+09,1.79564129783701300615e+09,1.79564129787998199468e+09,0,0,1,0,1.79572769787998199461e+09,0,0,'default',NULL,0,NULL,1,'/frozen/source',NULL);
INSERT INTO "jobs" VALUES('job_bbdlxkwjx6jisqo2bd6rw3c7','convert','FAILED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/failed-and-unwanted","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}','/frozen/failed-and-unwanted',1,3,0,'8d5fa54a6e50448928f20104e9c28569','old-worker',NULL,0.0,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','plan-of-failed-and-unwanted','{"type":"urn:reshard:error:checkpoint.incomplete","title":"Files or parts of tensors are missing.","status":422,"detail":"rank 1 is missing","code":"checkpoint.incomplete","fix":"copy it again","retryable":false,"details":{}}',NULL,4,1.79564129790701866151e+09,1.79564129793401503561e+09,1.79564129796398878101e+09,0,0,1,0,1.79572769796398878094e+09,0,0,'default',NULL,0,NULL,1,'/frozen/source',NULL);
INSERT INTO "jobs" VALUES('job_cvu3g4gwxpifnnb72yvv6au3','convert','FAILED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/failed-at-once","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}','/frozen/failed-at-once',1,3,0,'d3be3e0e1ffcc7a750418c25f15195c0','old-worker',NULL,0.0,0.0,0,NULL,NULL,'{"type":"urn:reshard:error:checkpoint.incomplete","title":"Files or parts of tensors are missing.","status":422,"detail":"rank 1 is missing","code":"checkpoint.incomplete","fix":"copy it again","retryable":false,"details":{}}',NULL,3,1.79564129798000144963e+09,1.79564129799899148938e+09,1.79564129801500439644e+09,0,0,0,0,NULL,0,0,'default',NULL,0,NULL,0,'/frozen/source',NULL);
INSERT INTO "jobs" VALUES('job_t6jjbbvhalqbdghbmpnygpvt','convert','FAILED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/exhausted","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}','/frozen/exhausted',1,1,0,'bdb43e79b7ca3e12767262927bf27027','old-worker',NULL,0.0,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','plan-of-exhausted','{"type":"urn:reshard:error:job.attempts_exhausted","title":"The job lost its worker in every allowed attempt.","status":500,"detail":"1 attempts were lost; the last one: the store did not answer","code":"job.attempts_exhausted","fix":"look at the worker''s log for the cause, then submit the job again: finished work is kept","retryable":false,"details":{"attempts":1,"last_error":{"type":"urn:reshard:error:storage.unavailable","title":"The store timed out or throttled.","status":503,"detail":"the store did not answer","code":"storage.unavailable","fix":"look at the store","retryable":true,"details":{}}}}',NULL,4,1.79564129802301073075e+09,1.79564129803399443623e+09,1.79564129806099081034e+09,0,0,1,0,1.79572769806099081036e+09,0,0,'default',NULL,0,NULL,1,'/frozen/source',NULL);
INSERT INTO "jobs" VALUES('job_ng34c4bgkq4gnnstoejeadad','convert','CANCELLED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/cancelled-before","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}','/frozen/cancelled-before',0,3,0,NULL,NULL,NULL,0.0,0.0,1,NULL,NULL,NULL,NULL,2,1.79564129807100892072e+09,NULL,1.79564129808601593966e+09,0,0,0,0,NULL,0,0,'default',NULL,0,NULL,0,'/frozen/source',NULL);
INSERT INTO "jobs" VALUES('job_h5lr25ushfk54fi7qrskhxuu','convert','CANCELLED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/cancelled","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}','/frozen/cancelled',1,3,0,'889ffe054872b313e5197f873f1c027a','old-worker',NULL,0.0,0.0,1,'{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','plan-of-cancelled',NULL,NULL,5,1.79564129809800529478e+09,1.79564129812299013138e+09,1.79564129816801095005e+09,0,0,1,0,NULL,0,0,'default',NULL,0,NULL,1,'/frozen/source',NULL);
INSERT INTO "jobs" VALUES('job_qaxwzwrxicao3dixmyliyqie','convert','CANCELLING','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/cancelling","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}','/frozen/cancelling',1,3,0,'cbe50e47f87b504cfe70d14b9185be0c','old-worker',1.79564135821399736402e+09,0.0,0.0,1,'{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','plan-of-cancelling',NULL,NULL,4,1.79564129818100643156e+09,1.7956412981940016746e+09,NULL,0,0,1,0,NULL,0,0,'default',NULL,0,NULL,1,'/frozen/source',NULL);
INSERT INTO "jobs" VALUES('job_xdyzxusy62apd25rcqus5f7j','convert','QUEUED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/a-plan","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}','/frozen/a-plan',0,3,0,NULL,NULL,NULL,0.0,0.0,0,NULL,NULL,NULL,NULL,1,1.79564129823499917977e+09,NULL,NULL,0,0,0,0,NULL,0,0,'default',NULL,0,NULL,0,'/frozen/source',NULL);
INSERT INTO "jobs" VALUES('job_ia6zvv2uzm7jx66vkalke324','plan','QUEUED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/a-plan","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}','',0,3,0,NULL,NULL,NULL,0.0,0.0,0,NULL,NULL,NULL,NULL,1,1.79564129825398921969e+09,NULL,NULL,0,0,0,0,NULL,0,0,'default',NULL,0,NULL,0,'/frozen/source',NULL);
INSERT INTO "jobs" VALUES('job_3mqu6k2g5goosniavr6qycda','convert','RUNNING','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/shared","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}','/frozen/shared',1,3,0,'8c1b0b675a728c5b567e900dc2e16b1e','old-worker',1.79564135830601072311e+09,0.0,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','plan-of-shared',NULL,NULL,6,1.795641298263001442e+09,1.7956412982809855938e+09,NULL,5,3,1,0,NULL,0,0,'default',NULL,0,NULL,1,'/frozen/source',NULL);
INSERT INTO "jobs" VALUES('job_gzoxlbx5l752l4ihfax5ivcx','convert','QUEUED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/refused","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}','/frozen/refused',1,3,1,NULL,NULL,NULL,0.0,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','plan-of-refused','{"type":"urn:reshard:error:storage.unavailable","title":"The store timed out or throttled.","status":503,"detail":"the store did not answer","code":"storage.unavailable","fix":"look at the store","retryable":true,"details":{}}',NULL,4,1.79564129843499803535e+09,1.79564129845901727672e+09,NULL,0,0,1,0,NULL,0,0,'default',NULL,0,NULL,1,'/frozen/source',NULL);
INSERT INTO "jobs" VALUES('job_4hd6codwe2ol7uxrz73gm7o4','convert','QUEUED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/retried","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null,"weight_decay_groups":"stage"},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null},"dcp":{"grammar":null,"files":null,"target_model_key":null,"target_optimizer_key":null,"trainer_files":null,"torch_file":"checkpoint.pt","missing_moments":"zero"}}}','/frozen/retried',1,3,1,NULL,NULL,NULL,0.0,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"bytes_kept":0,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','plan-of-retried',NULL,NULL,5,1.7956412985330059528e+09,1.79564129856700301166e+09,NULL,0,0,1,1,NULL,0,0,'default',NULL,0,NULL,1,'/frozen/source',NULL);
CREATE TABLE reshard_meta (
	name VARCHAR(64) NOT NULL, 
	value TEXT NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "reshard_meta" VALUES('oldest_program','1');
INSERT INTO "reshard_meta" VALUES('host','frozen');
CREATE TABLE reshard_revision (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT reshard_revision_pkc PRIMARY KEY (version_num)
);
INSERT INTO "reshard_revision" VALUES('0001');
CREATE TABLE tenants (
	name VARCHAR(64) NOT NULL, 
	created_at FLOAT NOT NULL, 
	read_roots TEXT, 
	write_roots TEXT, 
	profiles TEXT, 
	max_queued INTEGER, 
	max_running INTEGER, 
	max_workers INTEGER, 
	max_priority INTEGER, 
	bytes_per_day BIGINT, 
	weight INTEGER DEFAULT '1' NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "tenants" VALUES('default',1.79564129663701963421e+09,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,1);
CREATE TABLE tokens (
	id VARCHAR(32) NOT NULL, 
	tenant VARCHAR(64) NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	scopes VARCHAR(200) NOT NULL, 
	token_hash VARCHAR(64) NOT NULL, 
	session_hash VARCHAR(64) NOT NULL, 
	created_at FLOAT NOT NULL, 
	created_by VARCHAR(200) NOT NULL, 
	expires_at FLOAT, 
	revoked_at FLOAT, 
	last_used_at FLOAT, 
	PRIMARY KEY (id), 
	FOREIGN KEY(tenant) REFERENCES tenants (name) ON DELETE CASCADE
);
CREATE TABLE totals (
	name VARCHAR(64) NOT NULL, 
	label VARCHAR(64) NOT NULL, 
	value BIGINT NOT NULL, 
	PRIMARY KEY (name, label)
);
CREATE TABLE webhook_deliveries (
	id VARCHAR(40) NOT NULL, 
	webhook_id VARCHAR(40) NOT NULL, 
	job_id VARCHAR(40) NOT NULL, 
	event VARCHAR(32) NOT NULL, 
	payload TEXT NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	tries INTEGER NOT NULL, 
	created_at FLOAT NOT NULL, 
	next_at FLOAT NOT NULL, 
	owner VARCHAR(64), 
	lease_until FLOAT, 
	ended_at FLOAT, 
	last_status INTEGER, 
	last_error TEXT, 
	PRIMARY KEY (id)
);
CREATE TABLE webhooks (
	id VARCHAR(40) NOT NULL, 
	tenant VARCHAR(64) DEFAULT 'default' NOT NULL, 
	url TEXT NOT NULL, 
	events VARCHAR(200) NOT NULL, 
	description VARCHAR(200) NOT NULL, 
	secret TEXT NOT NULL, 
	previous_secret TEXT, 
	previous_until FLOAT, 
	created_at FLOAT NOT NULL, 
	disabled_at FLOAT, 
	PRIMARY KEY (id)
);
CREATE TABLE workers (
	name VARCHAR(200) NOT NULL, 
	started_at FLOAT NOT NULL, 
	seen_at FLOAT NOT NULL, 
	good_at FLOAT NOT NULL, 
	quarantined_until FLOAT NOT NULL, 
	quarantines INTEGER NOT NULL, 
	problem TEXT, 
	engine_peak_bytes BIGINT DEFAULT '0' NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "workers" VALUES('old-worker',1.79564129842200279237e+09,1.79564129842200279237e+09,0.0,0.0,0,NULL,0);
INSERT INTO "workers" VALUES('another-worker',1.79564129842598581309e+09,1.79564129842598581309e+09,1.79564129851900482182e+09,0.0,0,NULL,0);
CREATE INDEX jobs_by_age ON jobs (created_at, id);
CREATE INDEX jobs_by_state ON jobs (state, created_at);
CREATE INDEX jobs_by_target ON jobs (target);
CREATE INDEX jobs_by_discard ON jobs (discard_at);
CREATE UNIQUE INDEX jobs_by_public_id ON jobs (tenant, coalesce(given_id, id));
CREATE INDEX jobs_of_tenant ON jobs (tenant, created_at, id);
CREATE INDEX jobs_of_tenant_by_state ON jobs (state, tenant, created_at);
CREATE INDEX jobs_by_source ON jobs (tenant, substr(source, 1, 250));
CREATE INDEX job_labels_by_value ON job_labels (name, value);
CREATE INDEX idempotency_keys_by_job ON idempotency_keys (job_id);
CREATE INDEX job_workers_present ON job_workers (job_id) WHERE left_at IS NULL;
CREATE INDEX job_refusals_by_worker ON job_refusals (worker, at);
CREATE INDEX workers_by_seen ON workers (seen_at);
CREATE INDEX webhooks_of_tenant ON webhooks (tenant, created_at);
CREATE INDEX webhook_deliveries_due ON webhook_deliveries (state, next_at);
CREATE INDEX webhook_deliveries_of_webhook ON webhook_deliveries (webhook_id, created_at);
CREATE INDEX webhook_deliveries_sent_now ON webhook_deliveries (webhook_id, lease_until);
CREATE INDEX tokens_of_tenant ON tokens (tenant, created_at, id);
CREATE INDEX audit_log_of_tenant ON audit_log (tenant, id);
CREATE INDEX audit_log_by_age ON audit_log (at);
COMMIT;
