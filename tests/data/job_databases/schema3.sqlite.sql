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
INSERT INTO "idempotency_keys" VALUES('a-key','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','032386be9b1c352f472e9a2ac4259727',1.7954654836190047264e+09,'job_6n2vo4baxccenyxdibcxcjxv');
INSERT INTO "idempotency_keys" VALUES('a-held-key','eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee','bdbdb32eb41de5865edf8abb587e0190',1.79546548362499952316e+09,NULL);
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
INSERT INTO "job_events" VALUES('job_wtichxatrq3p4pdtrdash724',1,1.79546545361598730086e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_6n2vo4baxccenyxdibcxcjxv',1,1.79546545362198209762e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_u3g42ul4adzjkgd7wh3dcheo',1,1.79546545362600541108e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_u3g42ul4adzjkgd7wh3dcheo',2,1.79546545363300585743e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_u3g42ul4adzjkgd7wh3dcheo',3,1.7954654536420180797e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_u3g42ul4adzjkgd7wh3dcheo',4,1.79546545364600133899e+09,'state','QUEUED','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_trhkc7lp67kd2txk7h5j5nbw',1,1.79546545364901876445e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_trhkc7lp67kd2txk7h5j5nbw',2,1.79546545365199589731e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_trhkc7lp67kd2txk7h5j5nbw',3,1.79546545365501356125e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_trhkc7lp67kd2txk7h5j5nbw',4,1.79546545365899658198e+09,'state','QUEUED','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_tmajwgfsaczybyphrqv6o6lz',1,1.79546545366100811962e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_tmajwgfsaczybyphrqv6o6lz',2,1.79546545366398549079e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_vaqumkiavx3euazouu7aijpi',1,1.7954654536659970283e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_vaqumkiavx3euazouu7aijpi',2,1.79546545366901445393e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_vaqumkiavx3euazouu7aijpi',3,1.79546545367299771305e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_t5eiyzev3nkdyiihhvacyeho',1,1.79546545367400360105e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_t5eiyzev3nkdyiihhvacyeho',2,1.79546545367698073391e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_t5eiyzev3nkdyiihhvacyeho',3,1.79546545367999815941e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_t5eiyzev3nkdyiihhvacyeho',4,1795465453.68201,'state','VERIFYING','{"phase":"verifying","bytes_done":2,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":false}',NULL);
INSERT INTO "job_events" VALUES('job_7t6r3luxcr5ed5xvelz5datq',1,1.79546545368301582335e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_7t6r3luxcr5ed5xvelz5datq',2,1.79546545368599295621e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_7t6r3luxcr5ed5xvelz5datq',3,1.79546545368901038167e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_7t6r3luxcr5ed5xvelz5datq',4,1.79546545369098186489e+09,'state','VERIFYING','{"phase":"verifying","bytes_done":2,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":false}',NULL);
INSERT INTO "job_events" VALUES('job_7t6r3luxcr5ed5xvelz5datq',5,1.79546545369399929053e+09,'state','SUCCEEDED','{"phase":"verifying","bytes_done":2,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":false}',NULL);
INSERT INTO "job_events" VALUES('job_6eig3nj7x4jlwkptb74zgwip',1,1.79546545369601106643e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_6eig3nj7x4jlwkptb74zgwip',2,1.7954654536989881992e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_6eig3nj7x4jlwkptb74zgwip',3,1.79546545370200586323e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_6eig3nj7x4jlwkptb74zgwip',4,1.79546545370498299596e+09,'state','FAILED','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_qbo7qo6cxjeyintlv23rwgg6',1,1.79546545370699453351e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_qbo7qo6cxjeyintlv23rwgg6',2,1.79546545371101808549e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_qbo7qo6cxjeyintlv23rwgg6',3,1.79546545371399521827e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_qbo7qo6cxjeyintlv23rwgg6',4,1.79546545371701264377e+09,'state','FAILED','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_enxb6arvdfetn6ewiuxrqmto',1,1.79546545371801853172e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_enxb6arvdfetn6ewiuxrqmto',2,1.79546545372099590302e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_enxb6arvdfetn6ewiuxrqmto',3,1.79546545372300744057e+09,'state','FAILED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_qea7xszkl26kej2ilysax4ug',1,1.79546545372501897808e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_qea7xszkl26kej2ilysax4ug',2,1.79546545372799634934e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_qea7xszkl26kej2ilysax4ug',3,1.79546545373101377488e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_qea7xszkl26kej2ilysax4ug',4,1.7954654537349967957e+09,'state','FAILED','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_sffezyiya4qekyegb2wuw4cd',1,1.79546545373700857164e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_sffezyiya4qekyegb2wuw4cd',2,1795465453.73898,'state','CANCELLED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_h2ro4iuc3sgklwyriy3aej3x',1,1.79546545374099159237e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_h2ro4iuc3sgklwyriy3aej3x',2,1.79546545374400901796e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_h2ro4iuc3sgklwyriy3aej3x',3,1.79546545374698638918e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_h2ro4iuc3sgklwyriy3aej3x',4,1.79546545375100970263e+09,'state','CANCELLING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_h2ro4iuc3sgklwyriy3aej3x',5,1.79546545375298118593e+09,'state','CANCELLED','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_kekwe4cro2zhs3reubpvcoxi',1,1.79546545375499272349e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_kekwe4cro2zhs3reubpvcoxi',2,1.79546545375801038738e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_kekwe4cro2zhs3reubpvcoxi',3,1.79546545376098752025e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_kekwe4cro2zhs3reubpvcoxi',4,1.7954654537629990578e+09,'state','CANCELLING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_gcmrbfh7zaq6o4gkf4fkqcov',1,1.79546545376400494575e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_aj6oxumyz77afxeapozoovjd',1,1.795465453767988205e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_bhmuoyuncqlqttbegiwws444',1,1.79546545376899385456e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_bhmuoyuncqlqttbegiwws444',2,1.79546545377398276324e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_bhmuoyuncqlqttbegiwws444',3,1.79546545377800607686e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_bhmuoyuncqlqttbegiwws444',4,1.7954654537889897823e+09,'worker','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','{"worker":"helper-1","role":"helper","attempt":1,"joined_at":"2026-11-23T20:24:13.787018Z","left_at":null,"share":null}');
INSERT INTO "job_events" VALUES('job_bhmuoyuncqlqttbegiwws444',5,1.7954654537930130958e+09,'worker','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','{"worker":"helper-2","role":"helper","attempt":1,"joined_at":"2026-11-23T20:24:13.792007Z","left_at":null,"share":null}');
INSERT INTO "job_events" VALUES('job_bhmuoyuncqlqttbegiwws444',6,1.7954654537990078926e+09,'worker','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','{"worker":"helper-1","role":"helper","attempt":1,"joined_at":"2026-11-23T20:24:13.787018Z","left_at":"2026-11-23T20:24:13.798002Z","share":{"runs":2,"takeovers":0,"splits":0,"epochs_lost":0,"units":5,"write_bytes":99}}');
INSERT INTO "job_events" VALUES('job_mzvs3kljgqlem3kcdqvrufor',1,1.79546545380500268936e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_mzvs3kljgqlem3kcdqvrufor',2,1795465453.80802,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_mzvs3kljgqlem3kcdqvrufor',3,1.79546545381099724772e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_mzvs3kljgqlem3kcdqvrufor',4,1.79546545381598615645e+09,'state','QUEUED','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_25a6sc4lcc7z6v2jrpow4whp',1,1.79546545381900358204e+09,'state','QUEUED',NULL,NULL);
INSERT INTO "job_events" VALUES('job_25a6sc4lcc7z6v2jrpow4whp',2,1.7954654538229868412e+09,'state','PLANNING',NULL,NULL);
INSERT INTO "job_events" VALUES('job_25a6sc4lcc7z6v2jrpow4whp',3,1.79546545382701015474e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_25a6sc4lcc7z6v2jrpow4whp',4,1.7954654538280158043e+09,'state','FAILED','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
INSERT INTO "job_events" VALUES('job_25a6sc4lcc7z6v2jrpow4whp',5,1.79546545383099317551e+09,'state','QUEUED','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}',NULL);
CREATE TABLE job_labels (
	job_id VARCHAR(40) NOT NULL, 
	name VARCHAR(128) NOT NULL, 
	value VARCHAR(512) NOT NULL, 
	PRIMARY KEY (job_id, name), 
	FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "job_labels" VALUES('job_wtichxatrq3p4pdtrdash724','case','queued');
INSERT INTO "job_labels" VALUES('job_wtichxatrq3p4pdtrdash724','team','x');
INSERT INTO "job_labels" VALUES('job_6n2vo4baxccenyxdibcxcjxv','case','with-a-key');
INSERT INTO "job_labels" VALUES('job_6n2vo4baxccenyxdibcxcjxv','team','x');
INSERT INTO "job_labels" VALUES('job_u3g42ul4adzjkgd7wh3dcheo','case','released');
INSERT INTO "job_labels" VALUES('job_u3g42ul4adzjkgd7wh3dcheo','team','x');
INSERT INTO "job_labels" VALUES('job_trhkc7lp67kd2txk7h5j5nbw','case','to-be-tried-again');
INSERT INTO "job_labels" VALUES('job_trhkc7lp67kd2txk7h5j5nbw','team','x');
INSERT INTO "job_labels" VALUES('job_tmajwgfsaczybyphrqv6o6lz','case','planning');
INSERT INTO "job_labels" VALUES('job_tmajwgfsaczybyphrqv6o6lz','team','x');
INSERT INTO "job_labels" VALUES('job_vaqumkiavx3euazouu7aijpi','case','running');
INSERT INTO "job_labels" VALUES('job_vaqumkiavx3euazouu7aijpi','team','x');
INSERT INTO "job_labels" VALUES('job_t5eiyzev3nkdyiihhvacyeho','case','verifying');
INSERT INTO "job_labels" VALUES('job_t5eiyzev3nkdyiihhvacyeho','team','x');
INSERT INTO "job_labels" VALUES('job_7t6r3luxcr5ed5xvelz5datq','case','succeeded');
INSERT INTO "job_labels" VALUES('job_7t6r3luxcr5ed5xvelz5datq','team','x');
INSERT INTO "job_labels" VALUES('job_6eig3nj7x4jlwkptb74zgwip','case','failed');
INSERT INTO "job_labels" VALUES('job_6eig3nj7x4jlwkptb74zgwip','team','x');
INSERT INTO "job_labels" VALUES('job_qbo7qo6cxjeyintlv23rwgg6','case','failed-and-unwanted');
INSERT INTO "job_labels" VALUES('job_qbo7qo6cxjeyintlv23rwgg6','team','x');
INSERT INTO "job_labels" VALUES('job_enxb6arvdfetn6ewiuxrqmto','case','failed-at-once');
INSERT INTO "job_labels" VALUES('job_enxb6arvdfetn6ewiuxrqmto','team','x');
INSERT INTO "job_labels" VALUES('job_qea7xszkl26kej2ilysax4ug','case','exhausted');
INSERT INTO "job_labels" VALUES('job_qea7xszkl26kej2ilysax4ug','team','x');
INSERT INTO "job_labels" VALUES('job_sffezyiya4qekyegb2wuw4cd','case','cancelled-before');
INSERT INTO "job_labels" VALUES('job_sffezyiya4qekyegb2wuw4cd','team','x');
INSERT INTO "job_labels" VALUES('job_h2ro4iuc3sgklwyriy3aej3x','case','cancelled');
INSERT INTO "job_labels" VALUES('job_h2ro4iuc3sgklwyriy3aej3x','team','x');
INSERT INTO "job_labels" VALUES('job_kekwe4cro2zhs3reubpvcoxi','case','cancelling');
INSERT INTO "job_labels" VALUES('job_kekwe4cro2zhs3reubpvcoxi','team','x');
INSERT INTO "job_labels" VALUES('job_gcmrbfh7zaq6o4gkf4fkqcov','case','a-plan');
INSERT INTO "job_labels" VALUES('job_gcmrbfh7zaq6o4gkf4fkqcov','team','x');
INSERT INTO "job_labels" VALUES('job_aj6oxumyz77afxeapozoovjd','case','planned');
INSERT INTO "job_labels" VALUES('job_bhmuoyuncqlqttbegiwws444','case','shared');
INSERT INTO "job_labels" VALUES('job_bhmuoyuncqlqttbegiwws444','team','x');
INSERT INTO "job_labels" VALUES('job_mzvs3kljgqlem3kcdqvrufor','case','refused');
INSERT INTO "job_labels" VALUES('job_mzvs3kljgqlem3kcdqvrufor','team','x');
INSERT INTO "job_labels" VALUES('job_25a6sc4lcc7z6v2jrpow4whp','case','retried');
INSERT INTO "job_labels" VALUES('job_25a6sc4lcc7z6v2jrpow4whp','team','x');
CREATE TABLE job_plans (
	job_id VARCHAR(40) NOT NULL, 
	digest VARCHAR(128) NOT NULL, 
	PRIMARY KEY (job_id, digest), 
	FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "job_plans" VALUES('job_u3g42ul4adzjkgd7wh3dcheo','plan-of-released');
INSERT INTO "job_plans" VALUES('job_trhkc7lp67kd2txk7h5j5nbw','plan-of-to-be-tried-again');
INSERT INTO "job_plans" VALUES('job_vaqumkiavx3euazouu7aijpi','plan-of-running');
INSERT INTO "job_plans" VALUES('job_t5eiyzev3nkdyiihhvacyeho','plan-of-verifying');
INSERT INTO "job_plans" VALUES('job_6eig3nj7x4jlwkptb74zgwip','plan-of-failed');
INSERT INTO "job_plans" VALUES('job_qbo7qo6cxjeyintlv23rwgg6','plan-of-failed-and-unwanted');
INSERT INTO "job_plans" VALUES('job_qea7xszkl26kej2ilysax4ug','plan-of-exhausted');
INSERT INTO "job_plans" VALUES('job_kekwe4cro2zhs3reubpvcoxi','plan-of-cancelling');
INSERT INTO "job_plans" VALUES('job_bhmuoyuncqlqttbegiwws444','plan-of-shared');
INSERT INTO "job_plans" VALUES('job_mzvs3kljgqlem3kcdqvrufor','plan-of-refused');
INSERT INTO "job_plans" VALUES('job_25a6sc4lcc7z6v2jrpow4whp','plan-of-retried');
CREATE TABLE job_refusals (
	job_id VARCHAR(40) NOT NULL, 
	worker VARCHAR(200) NOT NULL, 
	code VARCHAR(64) NOT NULL, 
	at FLOAT NOT NULL, 
	PRIMARY KEY (job_id, worker), 
	FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "job_refusals" VALUES('job_mzvs3kljgqlem3kcdqvrufor','old-worker','storage.unavailable',1.79546545381300902367e+09);
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
INSERT INTO "job_workers" VALUES('job_u3g42ul4adzjkgd7wh3dcheo','6bf77777e53d878a75cbfff6eb5e4649','old-worker','owner',1,1.79546545363401174539e+09,NULL,1.79546545364700698855e+09,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_trhkc7lp67kd2txk7h5j5nbw','67baa8c37000a2b82fff9d08a8403785','old-worker','owner',1,1.79546545365199589731e+09,NULL,1.79546545365899658198e+09,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_tmajwgfsaczybyphrqv6o6lz','5a3e0e08a02b7264cd0a0cee8093fe02','old-worker','owner',1,1.79546545366398549079e+09,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_vaqumkiavx3euazouu7aijpi','48753ca38f501b926ce6a2bb208498a7','old-worker','owner',1,1.79546545366901445393e+09,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_t5eiyzev3nkdyiihhvacyeho','e6189d16b42de7c5b4e9382fad97dbf3','old-worker','owner',1,1.7954654536779866219e+09,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_7t6r3luxcr5ed5xvelz5datq','9537b538189e0a9b9383cebea8f652ec','old-worker','owner',1,1.79546545368599295621e+09,NULL,1.79546545369399929053e+09,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_6eig3nj7x4jlwkptb74zgwip','5dbed0442f0ebb832e518b937c9333ab','old-worker','owner',1,1.7954654536989881992e+09,NULL,1.79546545370498299596e+09,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_qbo7qo6cxjeyintlv23rwgg6','d89c5b329fe302dc3bfd0df7751bc976','old-worker','owner',1,1.79546545371101808549e+09,NULL,1.79546545371701264377e+09,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_enxb6arvdfetn6ewiuxrqmto','d264386528758210105d6bcbc0b57bdb','old-worker','owner',1,1.79546545372200155258e+09,NULL,1.79546545372401332853e+09,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_qea7xszkl26kej2ilysax4ug','ef546f52d6bb1eeacfd7c591526fbba3','old-worker','owner',1,1.79546545372799634934e+09,NULL,1.7954654537349967957e+09,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_h2ro4iuc3sgklwyriy3aej3x','aab91f79690eac9ac67b82b80ee1ffb9','old-worker','owner',1,1.79546545374400901796e+09,NULL,1.79546545375298118593e+09,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_kekwe4cro2zhs3reubpvcoxi','3c39ca0c62574130e56372f1e61fec70','old-worker','owner',1,1.79546545375801038738e+09,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_bhmuoyuncqlqttbegiwws444','efb00e046f7c60e81204ece926524f65','old-worker','owner',1,1.79546545377498865123e+09,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_bhmuoyuncqlqttbegiwws444','9a9cfd8a9b5b6d0c842668ddb8913fa4','helper-1','helper',1,1.79546545378701829912e+09,1.79546551378701829907e+09,1.79546545379800200461e+09,0,2,0,0,0,5,99);
INSERT INTO "job_workers" VALUES('job_bhmuoyuncqlqttbegiwws444','46825bb12512dad6ede4b313dab3d28e','helper-2','helper',1,1.79546545379200720785e+09,1.79546551379200720792e+09,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_mzvs3kljgqlem3kcdqvrufor','9df0c126dc754e34e93194d7eea39752','old-worker','owner',1,1795465453.80802,NULL,1.79546545381598615645e+09,0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "job_workers" VALUES('job_25a6sc4lcc7z6v2jrpow4whp','ef0831d615ca5ef6377ebb354eaf6396','old-worker','owner',1,1.79546545382399272915e+09,NULL,1.7954654538280158043e+09,0,NULL,NULL,NULL,NULL,NULL,NULL);
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
	retries INTEGER DEFAULT '0' NOT NULL, 
	discard_at FLOAT, 
	discard_asked INTEGER DEFAULT '0' NOT NULL, 
	discard_tries INTEGER DEFAULT '0' NOT NULL, 
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
INSERT INTO "jobs" VALUES('job_wtichxatrq3p4pdtrdash724','convert','QUEUED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/queued","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/queued',0,3,0,0,0,0,0,NULL,0,0,NULL,NULL,NULL,0.0,0.0,0,NULL,NULL,NULL,NULL,1,1.79546545361401581764e+09,NULL,NULL);
INSERT INTO "jobs" VALUES('job_6n2vo4baxccenyxdibcxcjxv','convert','QUEUED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/with-a-key","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/with-a-key',0,3,0,0,0,0,0,NULL,0,0,NULL,NULL,NULL,0.0,0.0,0,NULL,NULL,NULL,NULL,1,1.7954654536210165024e+09,NULL,NULL);
INSERT INTO "jobs" VALUES('job_u3g42ul4adzjkgd7wh3dcheo','convert','QUEUED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/released","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/released',1,3,0,0,1,1,0,NULL,0,0,NULL,NULL,NULL,0.0,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','plan-of-released',NULL,NULL,4,1.79546545362600541108e+09,1.79546545363300585743e+09,NULL);
INSERT INTO "jobs" VALUES('job_trhkc7lp67kd2txk7h5j5nbw','convert','QUEUED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/to-be-tried-again","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/to-be-tried-again',1,3,0,0,1,0,0,NULL,0,0,NULL,NULL,NULL,1.79546545366799068454e+09,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','plan-of-to-be-tried-again','{"type":"urn:reshard:error:storage.unavailable","title":"The store timed out or throttled.","status":503,"detail":"the store did not answer","code":"storage.unavailable","fix":"look at the store","retryable":true,"details":{}}',NULL,4,1.7954654536480128765e+09,1795465453.65099,NULL);
INSERT INTO "jobs" VALUES('job_tmajwgfsaczybyphrqv6o6lz','convert','PLANNING','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/planning","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/planning',1,3,0,0,0,0,0,NULL,0,0,'5a3e0e08a02b7264cd0a0cee8093fe02','old-worker',1795465513.66302,0.0,0.0,0,NULL,NULL,NULL,NULL,2,1.79546545366000223162e+09,1795465453.66302,NULL);
INSERT INTO "jobs" VALUES('job_vaqumkiavx3euazouu7aijpi','convert','RUNNING','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/running","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/running',1,3,0,0,1,0,0,NULL,0,0,'48753ca38f501b926ce6a2bb208498a7','old-worker',1.79546551367199182505e+09,0.0,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','plan-of-running',NULL,NULL,3,1.7954654536659970283e+09,1.79546545366901445393e+09,NULL);
INSERT INTO "jobs" VALUES('job_t5eiyzev3nkdyiihhvacyeho','convert','VERIFYING','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/verifying","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/verifying',1,3,0,0,0,0,0,NULL,0,0,'e6189d16b42de7c5b4e9382fad97dbf3','old-worker',1.79546551368100404735e+09,0.0,0.0,0,'{"phase":"verifying","bytes_done":2,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":false}','plan-of-verifying',NULL,NULL,4,1.79546545367400360105e+09,1.79546545367698073391e+09,NULL);
INSERT INTO "jobs" VALUES('job_7t6r3luxcr5ed5xvelz5datq','convert','SUCCEEDED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/succeeded","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/succeeded',1,3,0,0,0,0,0,NULL,0,0,'9537b538189e0a9b9383cebea8f652ec','old-worker',NULL,0.0,0.0,0,'{"phase":"verifying","bytes_done":2,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":false}','d',NULL,'{"schema_version":1,"target":"/frozen/succeeded","to":"universal","files":[],"read_bytes":1,"write_bytes":2,"server_copied_bytes":0,"resumed_bytes":0,"seconds":{},"plan_digest":"d","already_done":false,"verification":"default","warnings":[],"not_carried":[],"casts":[],"share":null}',5,1.79546545368301582335e+09,1.79546545368599295621e+09,1.79546545369299364097e+09);
INSERT INTO "jobs" VALUES('job_6eig3nj7x4jlwkptb74zgwip','convert','FAILED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/failed","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/failed',1,3,0,0,1,0,0,1.79555185370401740067e+09,0,0,'5dbed0442f0ebb832e518b937c9333ab','old-worker',NULL,0.0,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','plan-of-failed','{"type":"urn:reshard:error:checkpoint.incomplete","title":"Files or parts of tensors are missing.","status":422,"detail":"rank 1 is missing","code":"checkpoint.incomplete","fix":"copy it again","retryable":false,"details":{}}',NULL,4,1.79546545369601106643e+09,1.7954654536989881992e+09,1.79546545370401740074e+09);
INSERT INTO "jobs" VALUES('job_qbo7qo6cxjeyintlv23rwgg6','convert','FAILED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/failed-and-unwanted","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/failed-and-unwanted',1,3,0,0,1,0,0,1.79555185371600675584e+09,0,0,'d89c5b329fe302dc3bfd0df7751bc976','old-worker',NULL,0.0,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','plan-of-failed-and-unwanted','{"type":"urn:reshard:error:checkpoint.incomplete","title":"Files or parts of tensors are missing.","status":422,"detail":"rank 1 is missing","code":"checkpoint.incomplete","fix":"copy it again","retryable":false,"details":{}}',NULL,4,1.79546545370598888396e+09,1.79546545371001219754e+09,1.79546545371600675582e+09);
INSERT INTO "jobs" VALUES('job_enxb6arvdfetn6ewiuxrqmto','convert','FAILED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/failed-at-once","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/failed-at-once',1,3,0,0,0,0,0,NULL,0,0,'d264386528758210105d6bcbc0b57bdb','old-worker',NULL,0.0,0.0,0,NULL,NULL,'{"type":"urn:reshard:error:checkpoint.incomplete","title":"Files or parts of tensors are missing.","status":422,"detail":"rank 1 is missing","code":"checkpoint.incomplete","fix":"copy it again","retryable":false,"details":{}}',NULL,3,1.79546545371801853172e+09,1.79546545372099590302e+09,1.79546545372300744057e+09);
INSERT INTO "jobs" VALUES('job_qea7xszkl26kej2ilysax4ug','convert','FAILED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/exhausted","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/exhausted',1,1,0,0,1,0,0,1.79555185373399114607e+09,0,0,'ef546f52d6bb1eeacfd7c591526fbba3','old-worker',NULL,0.0,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','plan-of-exhausted','{"type":"urn:reshard:error:job.attempts_exhausted","title":"The job lost its worker in every allowed attempt.","status":500,"detail":"1 attempts were lost; the last one: the store did not answer","code":"job.attempts_exhausted","fix":"look at the worker''s log for the cause, then submit the job again: finished work is kept","retryable":false,"details":{"attempts":1,"last_error":{"type":"urn:reshard:error:storage.unavailable","title":"The store timed out or throttled.","status":503,"detail":"the store did not answer","code":"storage.unavailable","fix":"look at the store","retryable":true,"details":{}}}}',NULL,4,1.79546545372501897808e+09,1.79546545372699046139e+09,1.79546545373399114601e+09);
INSERT INTO "jobs" VALUES('job_sffezyiya4qekyegb2wuw4cd','convert','CANCELLED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/cancelled-before","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/cancelled-before',0,3,0,0,0,0,0,NULL,0,0,NULL,NULL,NULL,0.0,0.0,1,NULL,NULL,NULL,NULL,2,1.79546545373600268365e+09,NULL,1.79546545373801445964e+09);
INSERT INTO "jobs" VALUES('job_h2ro4iuc3sgklwyriy3aej3x','convert','CANCELLED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/cancelled","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/cancelled',1,3,0,0,1,0,0,NULL,0,0,'aab91f79690eac9ac67b82b80ee1ffb9','old-worker',NULL,0.0,0.0,1,'{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','plan-of-cancelled',NULL,NULL,5,1.79546545374099159237e+09,1.79546545374400901796e+09,1.79546545375298118593e+09);
INSERT INTO "jobs" VALUES('job_kekwe4cro2zhs3reubpvcoxi','convert','CANCELLING','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/cancelling","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/cancelling',1,3,0,0,1,0,0,NULL,0,0,'3c39ca0c62574130e56372f1e61fec70','old-worker',1.79546551376098752024e+09,0.0,0.0,1,'{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','plan-of-cancelling',NULL,NULL,4,1.79546545375499272349e+09,1.79546545375700449939e+09,NULL);
INSERT INTO "jobs" VALUES('job_gcmrbfh7zaq6o4gkf4fkqcov','convert','QUEUED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/a-plan","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/a-plan',0,3,0,0,0,0,0,NULL,0,0,NULL,NULL,NULL,0.0,0.0,0,NULL,NULL,NULL,NULL,1,1.79546545376400494575e+09,NULL,NULL);
INSERT INTO "jobs" VALUES('job_aj6oxumyz77afxeapozoovjd','plan','QUEUED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/a-plan","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','',0,3,0,0,0,0,0,NULL,0,0,NULL,NULL,NULL,0.0,0.0,0,NULL,NULL,NULL,NULL,1,1.79546545376698231692e+09,NULL,NULL);
INSERT INTO "jobs" VALUES('job_bhmuoyuncqlqttbegiwws444','convert','RUNNING','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/shared","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/shared',1,3,5,3,1,0,0,NULL,0,0,'efb00e046f7c60e81204ece926524f65','old-worker',1.79546551377700042725e+09,0.0,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','plan-of-shared',NULL,NULL,6,1.79546545376899385456e+09,1.79546545377398276324e+09,NULL);
INSERT INTO "jobs" VALUES('job_mzvs3kljgqlem3kcdqvrufor','convert','QUEUED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/refused","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/refused',1,3,0,0,1,1,0,NULL,0,0,NULL,NULL,NULL,0.0,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','plan-of-refused','{"type":"urn:reshard:error:storage.unavailable","title":"The store timed out or throttled.","status":503,"detail":"the store did not answer","code":"storage.unavailable","fix":"look at the store","retryable":true,"details":{}}',NULL,4,1.79546545380500268936e+09,1795465453.80802,NULL);
INSERT INTO "jobs" VALUES('job_25a6sc4lcc7z6v2jrpow4whp','convert','QUEUED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/retried","to":"universal","target_profile":null,"dtype":null,"replicas":"error","exclude_frozen":false,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto","options":{"deepspeed":{"zero_stage":null,"dp":null,"tp":1,"pp":1,"ep":1,"partition_method":null,"pipeline_layers":null,"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep","rules":null,"family":null,"names":null},"weights":{"max_shard_bytes":null},"peft":{"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null}}}','/frozen/retried',1,3,0,0,1,1,1,NULL,0,0,NULL,NULL,NULL,0.0,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null,"takes_workers":true}','plan-of-retried',NULL,NULL,5,1.79546545381900358204e+09,1.7954654538229868412e+09,NULL);
CREATE TABLE reshard_meta (
	name VARCHAR(64) NOT NULL, 
	value TEXT NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "reshard_meta" VALUES('schema_version','3');
INSERT INTO "reshard_meta" VALUES('host','frozen');
CREATE TABLE workers (
	name VARCHAR(200) NOT NULL, 
	started_at FLOAT NOT NULL, 
	seen_at FLOAT NOT NULL, 
	good_at FLOAT NOT NULL, 
	quarantined_until FLOAT NOT NULL, 
	quarantines INTEGER NOT NULL, 
	problem TEXT, 
	PRIMARY KEY (name)
);
INSERT INTO "workers" VALUES('old-worker',1.79546545380198502546e+09,1.79546545380198502546e+09,0.0,0.0,0,NULL);
INSERT INTO "workers" VALUES('another-worker',1.79546545380299091341e+09,1.79546545380299091341e+09,1.7954654538169920444e+09,0.0,0,NULL);
CREATE INDEX jobs_by_target ON jobs (target);
CREATE INDEX jobs_by_state ON jobs (state, created_at);
CREATE INDEX jobs_by_age ON jobs (created_at, id);
CREATE INDEX jobs_by_discard ON jobs (discard_at);
CREATE INDEX workers_by_seen ON workers (seen_at);
CREATE INDEX job_refusals_by_worker ON job_refusals (worker, at);
CREATE INDEX job_labels_by_value ON job_labels (name, value);
CREATE INDEX idempotency_keys_by_job ON idempotency_keys (job_id);
COMMIT;
