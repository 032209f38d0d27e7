BEGIN TRANSACTION;
CREATE TABLE idempotency_keys (
	"key" VARCHAR(255) NOT NULL, 
	fingerprint VARCHAR(64) NOT NULL, 
	holder VARCHAR(64) NOT NULL, 
	held_until FLOAT NOT NULL, 
	job_id VARCHAR(40), 
	PRIMARY KEY ("key"), 
	FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "idempotency_keys" VALUES('a-key','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','4e0533e390bd0fd40c4978cc4e4f301a',1.79546548063700532908e+09,'job_y4bwyniikvkqwuv6vtmlpxls');
INSERT INTO "idempotency_keys" VALUES('a-held-key','eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee','cef2ec42aa04110816ef38fac44c5c6e',1.795465480655995369e+09,NULL);
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
INSERT INTO "job_events" VALUES('job_c5gjqfdrxf2je6hhf4yobmk4',1,1.79546545063298201554e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_y4bwyniikvkqwuv6vtmlpxls',1,1.79546545064501166348e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_ka7v5fhtgezebih4mzx2vblp',1,1.79546545065800690647e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_ka7v5fhtgezebih4mzx2vblp',2,1.79546545066701912878e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_ka7v5fhtgezebih4mzx2vblp',3,1.7954654506759910584e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_ka7v5fhtgezebih4mzx2vblp',4,1.79546545068001461029e+09,'state','QUEUED','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_xmxwqxticgmkrp6wtxhqvx3t',1,1.79546545068299174307e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_xmxwqxticgmkrp6wtxhqvx3t',2,1.79546545068701505661e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_xmxwqxticgmkrp6wtxhqvx3t',3,1.79546545068898653983e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_xmxwqxticgmkrp6wtxhqvx3t',4,1.79546545069300985341e+09,'state','QUEUED','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_xirfsjva63y4xnnkfffdhdch',1,1.79546545069598698614e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_xirfsjva63y4xnnkfffdhdch',2,1.79546545070001029964e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_7b6s3yjsqqztnfzugmdvsnyi',1,1.79546545070198178294e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_7b6s3yjsqqztnfzugmdvsnyi',2,1.79546545070600509644e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_7b6s3yjsqqztnfzugmdvsnyi',3,1.79546545070801687234e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_c6pnn7eo6q24gvbc7gryl7uk',1,1.79546545070998811726e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_c6pnn7eo6q24gvbc7gryl7uk',2,1.7954654507150173187e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_c6pnn7eo6q24gvbc7gryl7uk',3,1.79546545071698880188e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_c6pnn7eo6q24gvbc7gryl7uk',4,1.79546545071900033952e+09,'state','VERIFYING','{"phase":"verifying","bytes_done":2,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":false}',NULL);
INSERT INTO "job_events" VALUES('job_jeaycj46xbuo4wuwaklz5sli',1,1.79546545072101211551e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_jeaycj46xbuo4wuwaklz5sli',2,1.79546545072499513619e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_jeaycj46xbuo4wuwaklz5sli',3,1.79546545072801256182e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_jeaycj46xbuo4wuwaklz5sli',4,1.79546545072901844982e+09,'state','VERIFYING','{"phase":"verifying","bytes_done":2,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":false}',NULL);
INSERT INTO "job_events" VALUES('job_jeaycj46xbuo4wuwaklz5sli',5,1.79546545073199558255e+09,'state','SUCCEEDED','{"phase":"verifying","bytes_done":2,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":false}',NULL);
INSERT INTO "job_events" VALUES('job_2bv6mv65yxd7ezxwf6srw26v',1,1.7954654507340073585e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_2bv6mv65yxd7ezxwf6srw26v',2,1.7954654507369847298e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_2bv6mv65yxd7ezxwf6srw26v',3,1.7954654507389962673e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_2bv6mv65yxd7ezxwf6srw26v',4,1.79546545074201369281e+09,'state','FAILED','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_xcaq55nf4xwvr3bv73cide57',1,1.79546545074398517611e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_xcaq55nf4xwvr3bv73cide57',2,1.79546545074800848957e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_xcaq55nf4xwvr3bv73cide57',3,1795465450.74998,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_xcaq55nf4xwvr3bv73cide57',4,1.79546545075098562243e+09,'state','FAILED','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_mqgyahs5pnthvab3xfraabdq',1,1.79546545075500917432e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_mqgyahs5pnthvab3xfraabdq',2,1.79546545076200962068e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_mqgyahs5pnthvab3xfraabdq',3,1795465450.76901,'state','FAILED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_hzq43xrnlhidboosuhfaxqih',1,1.79546545077198743817e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_hzq43xrnlhidboosuhfaxqih',2,1.79546545077500486371e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_hzq43xrnlhidboosuhfaxqih',3,1.79546545077898788453e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_hzq43xrnlhidboosuhfaxqih',4,1.79546545078401708597e+09,'state','FAILED','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_wle4h3t6frhz2osmqfp4c3ad',1,1.79546545079001188278e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_wle4h3t6frhz2osmqfp4c3ad',2,1.79546545079600667954e+09,'state','CANCELLED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_ovkakkd6lc7kgjgqqmmcgyqw',1,1.79546545079898381231e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_ovkakkd6lc7kgjgqqmmcgyqw',2,1.7954654508020014763e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_ovkakkd6lc7kgjgqqmmcgyqw',3,1.79546545080401301385e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_ovkakkd6lc7kgjgqqmmcgyqw',4,1.79546545080799603458e+09,'state','CANCELLING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_ovkakkd6lc7kgjgqqmmcgyqw',5,1.79546545081000781061e+09,'state','CANCELLED','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_sofjzpry4xq4tcgqwlwqlcwm',1,1.79546545081201934816e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_sofjzpry4xq4tcgqwlwqlcwm',2,1.79546545081499671933e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_sofjzpry4xq4tcgqwlwqlcwm',3,1.79546545081700825684e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_sofjzpry4xq4tcgqwlwqlcwm',4,1.79546545082099151613e+09,'state','CANCELLING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_ipchz6ny2dfwonylvr22p4bq',1,1.79546545082400894159e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_xlnm5sypwgu5xqt7ttoafpkh',1,1.7954654508320152759e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_7n6ofjefyloutoj4y6o6s6gc',1,1.79546545083398675921e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_7n6ofjefyloutoj4y6o6s6gc',2,1.79546545083700418475e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_7n6ofjefyloutoj4y6o6s6gc',3,1.79546545084299898151e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_7n6ofjefyloutoj4y6o6s6gc',4,1.7954654508539824486e+09,'worker','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','{"worker":"helper-1","role":"helper","attempt":1,"joined_at":"2026-11-23T20:24:10.852011Z","left_at":null,"share":null}');
INSERT INTO "job_events" VALUES('job_7n6ofjefyloutoj4y6o6s6gc',5,1.79546545085901165005e+09,'worker','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','{"worker":"helper-2","role":"helper","attempt":1,"joined_at":"2026-11-23T20:24:10.858006Z","left_at":null,"share":null}');
INSERT INTO "job_events" VALUES('job_7n6ofjefyloutoj4y6o6s6gc',6,1.79546545086898946767e+09,'worker','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','{"worker":"helper-1","role":"helper","attempt":1,"joined_at":"2026-11-23T20:24:10.852011Z","left_at":"2026-11-23T20:24:10.867984Z","share":{"runs":2,"takeovers":0,"splits":0,"epochs_lost":0,"units":5,"write_bytes":99}}');
CREATE TABLE job_labels (
	job_id VARCHAR(40) NOT NULL, 
	name VARCHAR(128) NOT NULL, 
	value VARCHAR(512) NOT NULL, 
	PRIMARY KEY (job_id, name), 
	FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "job_labels" VALUES('job_c5gjqfdrxf2je6hhf4yobmk4','case','queued');
INSERT INTO "job_labels" VALUES('job_c5gjqfdrxf2je6hhf4yobmk4','team','x');
INSERT INTO "job_labels" VALUES('job_y4bwyniikvkqwuv6vtmlpxls','case','with-a-key');
INSERT INTO "job_labels" VALUES('job_y4bwyniikvkqwuv6vtmlpxls','team','x');
INSERT INTO "job_labels" VALUES('job_ka7v5fhtgezebih4mzx2vblp','case','released');
INSERT INTO "job_labels" VALUES('job_ka7v5fhtgezebih4mzx2vblp','team','x');
INSERT INTO "job_labels" VALUES('job_xmxwqxticgmkrp6wtxhqvx3t','case','to-be-tried-again');
INSERT INTO "job_labels" VALUES('job_xmxwqxticgmkrp6wtxhqvx3t','team','x');
INSERT INTO "job_labels" VALUES('job_xirfsjva63y4xnnkfffdhdch','case','planning');
INSERT INTO "job_labels" VALUES('job_xirfsjva63y4xnnkfffdhdch','team','x');
INSERT INTO "job_labels" VALUES('job_7b6s3yjsqqztnfzugmdvsnyi','case','running');
INSERT INTO "job_labels" VALUES('job_7b6s3yjsqqztnfzugmdvsnyi','team','x');
INSERT INTO "job_labels" VALUES('job_c6pnn7eo6q24gvbc7gryl7uk','case','verifying');
INSERT INTO "job_labels" VALUES('job_c6pnn7eo6q24gvbc7gryl7uk','team','x');
INSERT INTO "job_labels" VALUES('job_jeaycj46xbuo4wuwaklz5sli','case','succeeded');
INSERT INTO "job_labels" VALUES('job_jeaycj46xbuo4wuwaklz5sli','team','x');
INSERT INTO "job_labels" VALUES('job_2bv6mv65yxd7ezxwf6srw26v','case','failed');
INSERT INTO "job_labels" VALUES('job_2bv6mv65yxd7ezxwf6srw26v','team','x');
INSERT INTO "job_labels" VALUES('job_xcaq55nf4xwvr3bv73cide57','case','failed-and-unwanted');
INSERT INTO "job_labels" VALUES('job_xcaq55nf4xwvr3bv73cide57','team','x');
INSERT INTO "job_labels" VALUES('job_mqgyahs5pnthvab3xfraabdq','case','failed-at-once');
INSERT INTO "job_labels" VALUES('job_mqgyahs5pnthvab3xfraabdq','team','x');
INSERT INTO "job_labels" VALUES('job_hzq43xrnlhidboosuhfaxqih','case','exhausted');
INSERT INTO "job_labels" VALUES('job_hzq43xrnlhidboosuhfaxqih','team','x');
INSERT INTO "job_labels" VALUES('job_wle4h3t6frhz2osmqfp4c3ad','case','cancelled-before');
INSERT INTO "job_labels" VALUES('job_wle4h3t6frhz2osmqfp4c3ad','team','x');
INSERT INTO "job_labels" VALUES('job_ovkakkd6lc7kgjgqqmmcgyqw','case','cancelled');
INSERT INTO "job_labels" VALUES('job_ovkakkd6lc7kgjgqqmmcgyqw','team','x');
INSERT INTO "job_labels" VALUES('job_sofjzpry4xq4tcgqwlwqlcwm','case','cancelling');
INSERT INTO "job_labels" VALUES('job_sofjzpry4xq4tcgqwlwqlcwm','team','x');
INSERT INTO "job_labels" VALUES('job_ipchz6ny2dfwonylvr22p4bq','case','a-plan');
INSERT INTO "job_labels" VALUES('job_ipchz6ny2dfwonylvr22p4bq','team','x');
INSERT INTO "job_labels" VALUES('job_xlnm5sypwgu5xqt7ttoafpkh','case','planned');
INSERT INTO "job_labels" VALUES('job_7n6ofjefyloutoj4y6o6s6gc','case','shared');
INSERT INTO "job_labels" VALUES('job_7n6ofjefyloutoj4y6o6s6gc','team','x');
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
INSERT INTO "job_workers" VALUES('job_ka7v5fhtgezebih4mzx2vblp','d362f5dbcf1c1e76d71d8d2891cbdd50','old-worker','owner',1,1.79546545066798472409e+09,NULL,1.79546545068001461029e+09,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_xmxwqxticgmkrp6wtxhqvx3t','614b9f8c87a743d5bf21436aad862d58','old-worker','owner',1,1.79546545068798065183e+09,NULL,1.79546545069401550297e+09,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_xirfsjva63y4xnnkfffdhdch','d520f550c77612332a4150b04655b413','old-worker','owner',1,1.79546545070001029964e+09,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_7b6s3yjsqqztnfzugmdvsnyi','eb0267d9c710bff226d24d5e173d4dac','old-worker','owner',1,1.79546545070600509644e+09,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_c6pnn7eo6q24gvbc7gryl7uk','c1eaa8baa3b96f92afab690cbd85c728','old-worker','owner',1,1.79546545071598291393e+09,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_jeaycj46xbuo4wuwaklz5sli','a551adff9032416161f1c8f4db6e0f17','old-worker','owner',1,1.79546545072600102427e+09,NULL,1.79546545073199558255e+09,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_2bv6mv65yxd7ezxwf6srw26v','967a6177a5194ee488ef8cf0f1167eca','old-worker','owner',1,1.79546545073799037935e+09,NULL,1.79546545074201369281e+09,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_xcaq55nf4xwvr3bv73cide57','5006a19e3f18d9e96c7aa760cf0ed239','old-worker','owner',1,1.79546545074800848957e+09,NULL,1.79546545075098562243e+09,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_mqgyahs5pnthvab3xfraabdq','29eb242545a0c5579cd87ec5f68af195','old-worker','owner',1,1.79546545076599264141e+09,NULL,1795465450.76901,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_hzq43xrnlhidboosuhfaxqih','1d988b8a537b0c471a0c88e5329aa23f','old-worker','owner',1,1.79546545077500486371e+09,NULL,1.79546545078401708597e+09,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_ovkakkd6lc7kgjgqqmmcgyqw','edfd32bf739bc5ef1add8edc637e296d','old-worker','owner',1,1.7954654508020014763e+09,NULL,1.79546545081000781061e+09,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_sofjzpry4xq4tcgqwlwqlcwm','66ca5ac4027bb4125cd32a4652e51378','old-worker','owner',1,1.79546545081499671933e+09,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_7n6ofjefyloutoj4y6o6s6gc','118e53eea4f518b8fb67608c845be909','old-worker','owner',1,1.79546545083700418475e+09,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_7n6ofjefyloutoj4y6o6s6gc','4a2f09a6a05edacb36b2c3a1c06c70d4','helper-1','helper',1,1.79546545085201120382e+09,1.79546551085201120377e+09,1.79546545086798381811e+09,0,2,0,0,0,5,99);
INSERT INTO "job_workers" VALUES('job_7n6ofjefyloutoj4y6o6s6gc','1ac084c057683b7793b6696d0e0b9325','helper-2','helper',1,1.79546545085800600049e+09,1.79546551085800600057e+09,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE jobs (
	id VARCHAR(40) NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	request TEXT NOT NULL, 
	target TEXT NOT NULL, 
	attempt INTEGER NOT NULL, 
	max_attempts INTEGER NOT NULL, 
	priority INTEGER DEFAULT '0' NOT NULL, 
	max_workers INTEGER DEFAULT '0' NOT NULL, 
	takes_workers INTEGER DEFAULT '0' NOT NULL, 
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
	PRIMARY KEY (id)
);
INSERT INTO "jobs" VALUES('job_c5gjqfdrxf2je6hhf4yobmk4','convert','QUEUED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/queued","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/queued',0,3,0,0,0,0,NULL,NULL,NULL,0.0,0.0,0,NULL,NULL,NULL,NULL,1,1.79546545063101053237e+09,NULL,NULL);
INSERT INTO "jobs" VALUES('job_y4bwyniikvkqwuv6vtmlpxls','convert','QUEUED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/with-a-key","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/with-a-key',0,3,0,0,0,0,NULL,NULL,NULL,0.0,0.0,0,NULL,NULL,NULL,NULL,1,1.79546545063801097873e+09,NULL,NULL);
INSERT INTO "jobs" VALUES('job_ka7v5fhtgezebih4mzx2vblp','convert','QUEUED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/released","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/released',1,3,0,0,1,1,NULL,NULL,NULL,0.0,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL,NULL,NULL,4,1.79546545065700101848e+09,1.79546545066601324078e+09,NULL);
INSERT INTO "jobs" VALUES('job_xmxwqxticgmkrp6wtxhqvx3t','convert','QUEUED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/to-be-tried-again","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/to-be-tried-again',1,3,0,0,1,0,NULL,NULL,NULL,1.79546545070200395588e+09,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL,'{"type":"urn:reshard:error:storage.unavailable","title":"The store timed out or throttled.","status":503,"detail":"the store did not answer","code":"storage.unavailable","fix":"look at the store","retryable":true,"details":{}}',NULL,4,1.79546545068198585507e+09,1.79546545068600916865e+09,NULL);
INSERT INTO "jobs" VALUES('job_xirfsjva63y4xnnkfffdhdch','convert','PLANNING','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/planning","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/planning',1,3,0,0,0,0,'d520f550c77612332a4150b04655b413','old-worker',1.79546551069900465016e+09,0.0,0.0,0,NULL,NULL,NULL,NULL,2,1.79546545069498109819e+09,1.79546545069900465008e+09,NULL);
INSERT INTO "jobs" VALUES('job_7b6s3yjsqqztnfzugmdvsnyi','convert','RUNNING','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/running","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/running',1,3,0,0,1,0,'eb0267d9c710bff226d24d5e173d4dac','old-worker',1.79546551070801687242e+09,0.0,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL,NULL,NULL,3,1.79546545070198178294e+09,1.79546545070600509644e+09,NULL);
INSERT INTO "jobs" VALUES('job_c6pnn7eo6q24gvbc7gryl7uk','convert','VERIFYING','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/verifying","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/verifying',1,3,0,0,0,0,'c1eaa8baa3b96f92afab690cbd85c728','old-worker',1.79546551071900033951e+09,0.0,0.0,0,'{"phase":"verifying","bytes_done":2,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":false}',NULL,NULL,NULL,4,1.79546545070998811726e+09,1.7954654507150173187e+09,NULL);
INSERT INTO "jobs" VALUES('job_jeaycj46xbuo4wuwaklz5sli','convert','SUCCEEDED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/succeeded","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/succeeded',1,3,0,0,0,0,'a551adff9032416161f1c8f4db6e0f17','old-worker',NULL,0.0,0.0,0,'{"phase":"verifying","bytes_done":2,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":false}','d',NULL,'{"schema_version":1,"target":"/frozen/succeeded","to":"universal","files":[],"read_bytes":1,"write_bytes":2,"server_copied_bytes":0,"resumed_bytes":0,"seconds":{},"plan_digest":"d","already_done":false,"verification":"default","warnings":[],"not_carried":[],"casts":[],"share":null}',5,1.79546545072000622751e+09,1.79546545072298336029e+09,1795465450.73099);
INSERT INTO "jobs" VALUES('job_2bv6mv65yxd7ezxwf6srw26v','convert','FAILED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/failed","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/failed',1,3,0,0,1,0,'967a6177a5194ee488ef8cf0f1167eca','old-worker',NULL,0.0,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL,'{"type":"urn:reshard:error:checkpoint.incomplete","title":"Files or parts of tensors are missing.","status":422,"detail":"rank 1 is missing","code":"checkpoint.incomplete","fix":"copy it again","retryable":false,"details":{}}',NULL,4,1.7954654507330014705e+09,1.7954654507369847298e+09,1.79546545074100780481e+09);
INSERT INTO "jobs" VALUES('job_xcaq55nf4xwvr3bv73cide57','convert','FAILED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/failed-and-unwanted","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/failed-and-unwanted',1,3,0,0,1,0,'5006a19e3f18d9e96c7aa760cf0ed239','old-worker',NULL,0.0,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL,'{"type":"urn:reshard:error:checkpoint.incomplete","title":"Files or parts of tensors are missing.","status":422,"detail":"rank 1 is missing","code":"checkpoint.incomplete","fix":"copy it again","retryable":false,"details":{}}',NULL,4,1.79546545074301958089e+09,1.79546545074700260162e+09,1.79546545075098562243e+09);
INSERT INTO "jobs" VALUES('job_mqgyahs5pnthvab3xfraabdq','convert','FAILED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/failed-at-once","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/failed-at-once',1,3,0,0,0,0,'29eb242545a0c5579cd87ec5f68af195','old-worker',NULL,0.0,0.0,0,NULL,NULL,'{"type":"urn:reshard:error:checkpoint.incomplete","title":"Files or parts of tensors are missing.","status":422,"detail":"rank 1 is missing","code":"checkpoint.incomplete","fix":"copy it again","retryable":false,"details":{}}',NULL,3,1.79546545075500917432e+09,1.79546545076100373273e+09,1.79546545076800441748e+09);
INSERT INTO "jobs" VALUES('job_hzq43xrnlhidboosuhfaxqih','convert','FAILED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/exhausted","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/exhausted',1,1,0,0,1,0,'1d988b8a537b0c471a0c88e5329aa23f','old-worker',NULL,0.0,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL,'{"type":"urn:reshard:error:job.attempts_exhausted","title":"The job lost its worker in every allowed attempt.","status":500,"detail":"1 attempts were lost; the last one: the store did not answer","code":"job.attempts_exhausted","fix":"look at the worker''s log for the cause, then submit the job again: finished work is kept","retryable":false,"details":{"attempts":1,"last_error":{"type":"urn:reshard:error:storage.unavailable","title":"The store timed out or throttled.","status":503,"detail":"the store did not answer","code":"storage.unavailable","fix":"look at the store","retryable":true,"details":{}}}}',NULL,4,1.79546545077098155022e+09,1.79546545077399921416e+09,1.79546545078301143642e+09);
INSERT INTO "jobs" VALUES('job_wle4h3t6frhz2osmqfp4c3ad','convert','CANCELLED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/cancelled-before","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/cancelled-before',0,3,0,0,0,0,NULL,NULL,NULL,0.0,0.0,1,NULL,NULL,NULL,NULL,2,1.79546545078900599478e+09,NULL,1.79546545079500079154e+09);
INSERT INTO "jobs" VALUES('job_ovkakkd6lc7kgjgqqmmcgyqw','convert','CANCELLED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/cancelled","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/cancelled',1,3,0,0,1,0,'edfd32bf739bc5ef1add8edc637e296d','old-worker',NULL,0.0,0.0,1,'{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL,NULL,NULL,5,1.79546545079801821709e+09,1.79546545080099558835e+09,1.79546545081000781061e+09);
INSERT INTO "jobs" VALUES('job_sofjzpry4xq4tcgqwlwqlcwm','convert','CANCELLING','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/cancelling","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/cancelling',1,3,0,0,1,0,'66ca5ac4027bb4125cd32a4652e51378','old-worker',1.79546551081700825691e+09,0.0,0.0,1,'{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL,NULL,NULL,4,1.79546545081201934816e+09,1.79546545081499671933e+09,NULL);
INSERT INTO "jobs" VALUES('job_ipchz6ny2dfwonylvr22p4bq','convert','QUEUED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/a-plan","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/a-plan',0,3,0,0,0,0,NULL,NULL,NULL,0.0,0.0,0,NULL,NULL,NULL,NULL,1,1.79546545082300305364e+09,NULL,NULL);
INSERT INTO "jobs" VALUES('job_xlnm5sypwgu5xqt7ttoafpkh','plan','QUEUED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/a-plan","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','',0,3,0,0,0,0,NULL,NULL,NULL,0.0,0.0,0,NULL,NULL,NULL,NULL,1,1.79546545083100938795e+09,NULL,NULL);
INSERT INTO "jobs" VALUES('job_7n6ofjefyloutoj4y6o6s6gc','convert','RUNNING','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/shared","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/shared',1,3,5,3,1,0,'118e53eea4f518b8fb67608c845be909','old-worker',1.79546551084199309351e+09,0.0,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL,NULL,NULL,6,1.79546545083298087113e+09,1.79546545083599829676e+09,NULL);
CREATE TABLE reshard_meta (
	name VARCHAR(64) NOT NULL, 
	value TEXT NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "reshard_meta" VALUES('schema_version','2');
INSERT INTO "reshard_meta" VALUES('host','frozen');
CREATE INDEX jobs_by_state ON jobs (state, created_at);
CREATE INDEX jobs_by_age ON jobs (created_at, id);
CREATE INDEX jobs_by_target ON jobs (target);
CREATE INDEX job_labels_by_value ON job_labels (name, value);
COMMIT;
