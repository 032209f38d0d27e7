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
INSERT INTO "idempotency_keys" VALUES('a-key','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','af43aa7baa3cb6a9d43ac7c15b8e6b5c',1.79546547859601855279e+09,'job_neejsht73aisvansr5vletqr');
INSERT INTO "idempotency_keys" VALUES('a-held-key','eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee','7f6b8037155479e6b006213270ec708c',1.79546547860000157352e+09,NULL);
CREATE TABLE job_events (
	job_id VARCHAR(40) NOT NULL, 
	seq INTEGER NOT NULL, 
	at FLOAT NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	progress TEXT, 
	PRIMARY KEY (job_id, seq), 
	FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "job_events" VALUES('job_c6dm43phtdmawx45rlz5ljxa',1,1.79546544859300112725e+09,'state','QUEUED',NULL);
INSERT INTO "job_events" VALUES('job_neejsht73aisvansr5vletqr',1,1795465448.59799,'state','QUEUED',NULL);
INSERT INTO "job_events" VALUES('job_ritybxam4diw53bysufmfi6k',1,1.79546544860100746156e+09,'state','QUEUED',NULL);
INSERT INTO "job_events" VALUES('job_ritybxam4diw53bysufmfi6k',2,1.79546544860800790788e+09,'state','PLANNING',NULL);
INSERT INTO "job_events" VALUES('job_ritybxam4diw53bysufmfi6k',3,1.79546544861098527909e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO "job_events" VALUES('job_ritybxam4diw53bysufmfi6k',4,1.79546544861299705499e+09,'state','QUEUED','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO "job_events" VALUES('job_t2kzyy6fvl7v725jyyafi5ls',1,1795465448.61698,'state','QUEUED',NULL);
INSERT INTO "job_events" VALUES('job_t2kzyy6fvl7v725jyyafi5ls',2,1.79546544861999750135e+09,'state','PLANNING',NULL);
INSERT INTO "job_events" VALUES('job_t2kzyy6fvl7v725jyyafi5ls',3,1.7954654486210033893e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO "job_events" VALUES('job_t2kzyy6fvl7v725jyyafi5ls',4,1.79546544862398052217e+09,'state','QUEUED','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO "job_events" VALUES('job_aabxiw4vfg34n7nbb2xhx7fx',1,1.79546544862498641016e+09,'state','QUEUED',NULL);
INSERT INTO "job_events" VALUES('job_aabxiw4vfg34n7nbb2xhx7fx',2,1.79546544862800383566e+09,'state','PLANNING',NULL);
INSERT INTO "job_events" VALUES('job_ovthoxohespqm7psuq2hfoiw',1,1.79546544862900972362e+09,'state','QUEUED',NULL);
INSERT INTO "job_events" VALUES('job_ovthoxohespqm7psuq2hfoiw',2,1.79546544863098120684e+09,'state','PLANNING',NULL);
INSERT INTO "job_events" VALUES('job_ovthoxohespqm7psuq2hfoiw',3,1.79546544863198709492e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO "job_events" VALUES('job_wnwfjf7pq6s3e4b7oyh2f5r6',1,1.79546544863299274447e+09,'state','QUEUED',NULL);
INSERT INTO "job_events" VALUES('job_wnwfjf7pq6s3e4b7oyh2f5r6',2,1.79546544863601016998e+09,'state','PLANNING',NULL);
INSERT INTO "job_events" VALUES('job_wnwfjf7pq6s3e4b7oyh2f5r6',3,1.79546544863701605793e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO "job_events" VALUES('job_wnwfjf7pq6s3e4b7oyh2f5r6',4,1.79546544863798165315e+09,'state','VERIFYING','{"phase":"verifying","bytes_done":2,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO "job_events" VALUES('job_4okoxe4gldiut2tlap2g2zqv',1,1.79546544863898754115e+09,'state','QUEUED',NULL);
INSERT INTO "job_events" VALUES('job_4okoxe4gldiut2tlap2g2zqv',2,1.79546544864099931722e+09,'state','PLANNING',NULL);
INSERT INTO "job_events" VALUES('job_4okoxe4gldiut2tlap2g2zqv',3,1.79546544864498233791e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO "job_events" VALUES('job_4okoxe4gldiut2tlap2g2zqv',4,1.79546544864598798746e+09,'state','VERIFYING','{"phase":"verifying","bytes_done":2,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO "job_events" VALUES('job_4okoxe4gldiut2tlap2g2zqv',5,1.79546544864900565153e+09,'state','SUCCEEDED','{"phase":"verifying","bytes_done":2,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO "job_events" VALUES('job_spqaegenifddumzkhcu4bsrx',1,1.79546544865001153948e+09,'state','QUEUED',NULL);
INSERT INTO "job_events" VALUES('job_spqaegenifddumzkhcu4bsrx',2,1.79546544865298867222e+09,'state','PLANNING',NULL);
INSERT INTO "job_events" VALUES('job_spqaegenifddumzkhcu4bsrx',3,1.79546544865399456021e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO "job_events" VALUES('job_spqaegenifddumzkhcu4bsrx',4,1.79546544865600609776e+09,'state','FAILED','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO "job_events" VALUES('job_ie7ywdmtfdj7ekzytrfj6zim',1,1.79546544865701198584e+09,'state','QUEUED',NULL);
INSERT INTO "job_events" VALUES('job_ie7ywdmtfdj7ekzytrfj6zim',2,1.79546544865998935697e+09,'state','PLANNING',NULL);
INSERT INTO "job_events" VALUES('job_ie7ywdmtfdj7ekzytrfj6zim',3,1.79546544866099500653e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO "job_events" VALUES('job_ie7ywdmtfdj7ekzytrfj6zim',4,1.79546544866200089452e+09,'state','FAILED','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO "job_events" VALUES('job_3wvumqmfgmcuebdhrldcimee',1,1.79546544866300678252e+09,'state','QUEUED',NULL);
INSERT INTO "job_events" VALUES('job_3wvumqmfgmcuebdhrldcimee',2,1.79546544866501832015e+09,'state','PLANNING',NULL);
INSERT INTO "job_events" VALUES('job_3wvumqmfgmcuebdhrldcimee',3,1.79546544866598391538e+09,'state','FAILED',NULL);
INSERT INTO "job_events" VALUES('job_rflkxecs2yqpitjeikoeswnr',1,1.79546544866799569128e+09,'state','QUEUED',NULL);
INSERT INTO "job_events" VALUES('job_rflkxecs2yqpitjeikoeswnr',2,1.79546544867101311683e+09,'state','PLANNING',NULL);
INSERT INTO "job_events" VALUES('job_rflkxecs2yqpitjeikoeswnr',3,1.79546544867201900478e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO "job_events" VALUES('job_rflkxecs2yqpitjeikoeswnr',4,1.79546544867499613764e+09,'state','FAILED','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO "job_events" VALUES('job_pqykcpgw2tejetsuv4t5cy3d',1,1.79546544867700791359e+09,'state','QUEUED',NULL);
INSERT INTO "job_events" VALUES('job_pqykcpgw2tejetsuv4t5cy3d',2,1.79546544867801380158e+09,'state','CANCELLED',NULL);
INSERT INTO "job_events" VALUES('job_7l7s25ztkb63x3ow2lkk7xk7',1,1.79546544867998504636e+09,'state','QUEUED',NULL);
INSERT INTO "job_events" VALUES('job_7l7s25ztkb63x3ow2lkk7xk7',2,1.7954654486819968224e+09,'state','PLANNING',NULL);
INSERT INTO "job_events" VALUES('job_7l7s25ztkb63x3ow2lkk7xk7',3,1.79546544868300247195e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO "job_events" VALUES('job_7l7s25ztkb63x3ow2lkk7xk7',4,1.79546544868698573112e+09,'state','CANCELLING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO "job_events" VALUES('job_7l7s25ztkb63x3ow2lkk7xk7',5,1.79546544868799161907e+09,'state','CANCELLED','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO "job_events" VALUES('job_b3sy73p2pxoqndtmxeq4wkvd',1,1.79546544868899726862e+09,'state','QUEUED',NULL);
INSERT INTO "job_events" VALUES('job_b3sy73p2pxoqndtmxeq4wkvd',2,1.79546544869100904466e+09,'state','PLANNING',NULL);
INSERT INTO "job_events" VALUES('job_b3sy73p2pxoqndtmxeq4wkvd',3,1.79546544869298028944e+09,'state','RUNNING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO "job_events" VALUES('job_b3sy73p2pxoqndtmxeq4wkvd',4,1.79546544869499206543e+09,'state','CANCELLING','{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}');
INSERT INTO "job_events" VALUES('job_6wbmaspm7evqaaopdwazltvs',1,1.79546544869599795338e+09,'state','QUEUED',NULL);
INSERT INTO "job_events" VALUES('job_z6ttaj3czzbtrmxzr325ouwx',1,1.79546544869901537897e+09,'state','QUEUED',NULL);
CREATE TABLE job_labels (
	job_id VARCHAR(40) NOT NULL, 
	name VARCHAR(128) NOT NULL, 
	value VARCHAR(512) NOT NULL, 
	PRIMARY KEY (job_id, name), 
	FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "job_labels" VALUES('job_c6dm43phtdmawx45rlz5ljxa','case','queued');
INSERT INTO "job_labels" VALUES('job_c6dm43phtdmawx45rlz5ljxa','team','x');
INSERT INTO "job_labels" VALUES('job_neejsht73aisvansr5vletqr','case','with-a-key');
INSERT INTO "job_labels" VALUES('job_neejsht73aisvansr5vletqr','team','x');
INSERT INTO "job_labels" VALUES('job_ritybxam4diw53bysufmfi6k','case','released');
INSERT INTO "job_labels" VALUES('job_ritybxam4diw53bysufmfi6k','team','x');
INSERT INTO "job_labels" VALUES('job_t2kzyy6fvl7v725jyyafi5ls','case','to-be-tried-again');
INSERT INTO "job_labels" VALUES('job_t2kzyy6fvl7v725jyyafi5ls','team','x');
INSERT INTO "job_labels" VALUES('job_aabxiw4vfg34n7nbb2xhx7fx','case','planning');
INSERT INTO "job_labels" VALUES('job_aabxiw4vfg34n7nbb2xhx7fx','team','x');
INSERT INTO "job_labels" VALUES('job_ovthoxohespqm7psuq2hfoiw','case','running');
INSERT INTO "job_labels" VALUES('job_ovthoxohespqm7psuq2hfoiw','team','x');
INSERT INTO "job_labels" VALUES('job_wnwfjf7pq6s3e4b7oyh2f5r6','case','verifying');
INSERT INTO "job_labels" VALUES('job_wnwfjf7pq6s3e4b7oyh2f5r6','team','x');
INSERT INTO "job_labels" VALUES('job_4okoxe4gldiut2tlap2g2zqv','case','succeeded');
INSERT INTO "job_labels" VALUES('job_4okoxe4gldiut2tlap2g2zqv','team','x');
INSERT INTO "job_labels" VALUES('job_spqaegenifddumzkhcu4bsrx','case','failed');
INSERT INTO "job_labels" VALUES('job_spqaegenifddumzkhcu4bsrx','team','x');
INSERT INTO "job_labels" VALUES('job_ie7ywdmtfdj7ekzytrfj6zim','case','failed-and-unwanted');
INSERT INTO "job_labels" VALUES('job_ie7ywdmtfdj7ekzytrfj6zim','team','x');
INSERT INTO "job_labels" VALUES('job_3wvumqmfgmcuebdhrldcimee','case','failed-at-once');
INSERT INTO "job_labels" VALUES('job_3wvumqmfgmcuebdhrldcimee','team','x');
INSERT INTO "job_labels" VALUES('job_rflkxecs2yqpitjeikoeswnr','case','exhausted');
INSERT INTO "job_labels" VALUES('job_rflkxecs2yqpitjeikoeswnr','team','x');
INSERT INTO "job_labels" VALUES('job_pqykcpgw2tejetsuv4t5cy3d','case','cancelled-before');
INSERT INTO "job_labels" VALUES('job_pqykcpgw2tejetsuv4t5cy3d','team','x');
INSERT INTO "job_labels" VALUES('job_7l7s25ztkb63x3ow2lkk7xk7','case','cancelled');
INSERT INTO "job_labels" VALUES('job_7l7s25ztkb63x3ow2lkk7xk7','team','x');
INSERT INTO "job_labels" VALUES('job_b3sy73p2pxoqndtmxeq4wkvd','case','cancelling');
INSERT INTO "job_labels" VALUES('job_b3sy73p2pxoqndtmxeq4wkvd','team','x');
INSERT INTO "job_labels" VALUES('job_6wbmaspm7evqaaopdwazltvs','case','a-plan');
INSERT INTO "job_labels" VALUES('job_6wbmaspm7evqaaopdwazltvs','team','x');
INSERT INTO "job_labels" VALUES('job_z6ttaj3czzbtrmxzr325ouwx','case','planned');
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
	PRIMARY KEY (id)
);
INSERT INTO "jobs" VALUES('job_c6dm43phtdmawx45rlz5ljxa','convert','QUEUED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/queued","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}','/frozen/queued',0,3,0,NULL,NULL,NULL,0.0,0.0,0,NULL,NULL,NULL,NULL,1,1.7954654485909893513e+09,NULL,NULL);
INSERT INTO "jobs" VALUES('job_neejsht73aisvansr5vletqr','convert','QUEUED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/with-a-key","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}','/frozen/with-a-key',0,3,0,NULL,NULL,NULL,0.0,0.0,0,NULL,NULL,NULL,NULL,1,1.79546544859698414798e+09,NULL,NULL);
INSERT INTO "jobs" VALUES('job_ritybxam4diw53bysufmfi6k','convert','QUEUED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/released","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}','/frozen/released',1,3,1,NULL,NULL,NULL,0.0,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}',NULL,NULL,NULL,4,1.79546544860100746156e+09,1.79546544860700225832e+09,NULL);
INSERT INTO "jobs" VALUES('job_t2kzyy6fvl7v725jyyafi5ls','convert','QUEUED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/to-be-tried-again","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}','/frozen/to-be-tried-again',1,3,0,NULL,NULL,NULL,1.79546544863398051259e+09,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}',NULL,'{"type":"urn:reshard:error:storage.unavailable","title":"The store timed out or throttled.","status":503,"detail":"the store did not answer","code":"storage.unavailable","fix":"look at the store","retryable":true,"details":{}}',NULL,4,1795465448.61698,1.79546544861999750135e+09,NULL);
INSERT INTO "jobs" VALUES('job_aabxiw4vfg34n7nbb2xhx7fx','convert','PLANNING','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/planning","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}','/frozen/planning',1,3,0,'77b3035cd0fb5ce7c3a7d7d954d9cb8d','old-worker',1.79546550862699794766e+09,0.0,0.0,0,NULL,NULL,NULL,NULL,2,1.79546544862498641016e+09,1.79546544862699794771e+09,NULL);
INSERT INTO "jobs" VALUES('job_ovthoxohespqm7psuq2hfoiw','convert','RUNNING','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/running","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}','/frozen/running',1,3,0,'8392d57ae8c8ff12f19538e617c745d1','old-worker',1.79546550863198709491e+09,0.0,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}',NULL,NULL,NULL,3,1.79546544862900972362e+09,1.79546544863098120684e+09,NULL);
INSERT INTO "jobs" VALUES('job_wnwfjf7pq6s3e4b7oyh2f5r6','convert','VERIFYING','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/verifying","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}','/frozen/verifying',1,3,0,'d008a6f44e6c0c2cceabb1348fe15222','old-worker',1.79546550863798165323e+09,0.0,0.0,0,'{"phase":"verifying","bytes_done":2,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}',NULL,NULL,NULL,4,1.79546544863299274447e+09,1.79546544863500452042e+09,NULL);
INSERT INTO "jobs" VALUES('job_4okoxe4gldiut2tlap2g2zqv','convert','SUCCEEDED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/succeeded","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}','/frozen/succeeded',1,3,0,'759d5a1895873d5b59cf5131dffc7b3f','old-worker',NULL,0.0,0.0,0,'{"phase":"verifying","bytes_done":2,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}','d',NULL,'{"schema_version":1,"target":"/frozen/succeeded","to":"universal","files":[],"read_bytes":1,"write_bytes":2,"server_copied_bytes":0,"resumed_bytes":0,"seconds":{},"plan_digest":"d","already_done":false,"verification":"default","warnings":[],"not_carried":[],"casts":[]}',5,1.79546544863898754115e+09,1.79546544864099931722e+09,1.79546544864799976354e+09);
INSERT INTO "jobs" VALUES('job_spqaegenifddumzkhcu4bsrx','convert','FAILED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/failed","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}','/frozen/failed',1,3,0,'a6183cf4b603df9cfd3649cf42af67a4','old-worker',NULL,0.0,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}',NULL,'{"type":"urn:reshard:error:checkpoint.incomplete","title":"Files or parts of tensors are missing.","status":422,"detail":"rank 1 is missing","code":"checkpoint.incomplete","fix":"copy it again","retryable":false,"details":{}}',NULL,4,1.79546544865001153948e+09,1.79546544865198278427e+09,1.79546544865600609776e+09);
INSERT INTO "jobs" VALUES('job_ie7ywdmtfdj7ekzytrfj6zim','convert','FAILED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/failed-and-unwanted","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}','/frozen/failed-and-unwanted',1,3,0,'96bd72cca077d883ee80d45a46781515','old-worker',NULL,0.0,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}',NULL,'{"type":"urn:reshard:error:checkpoint.incomplete","title":"Files or parts of tensors are missing.","status":422,"detail":"rank 1 is missing","code":"checkpoint.incomplete","fix":"copy it again","retryable":false,"details":{}}',NULL,4,1.79546544865701198584e+09,1.79546544865998935697e+09,1.79546544866200089452e+09);
INSERT INTO "jobs" VALUES('job_3wvumqmfgmcuebdhrldcimee','convert','FAILED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/failed-at-once","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}','/frozen/failed-at-once',1,3,0,'b20d94070ce06f33145517ebfbee0eef','old-worker',NULL,0.0,0.0,0,NULL,NULL,'{"type":"urn:reshard:error:checkpoint.incomplete","title":"Files or parts of tensors are missing.","status":422,"detail":"rank 1 is missing","code":"checkpoint.incomplete","fix":"copy it again","retryable":false,"details":{}}',NULL,3,1.79546544866300678252e+09,1.79546544866501832015e+09,1.79546544866598391538e+09);
INSERT INTO "jobs" VALUES('job_rflkxecs2yqpitjeikoeswnr','convert','FAILED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/exhausted","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}','/frozen/exhausted',1,1,0,'78749ee00bcde64fbf2982435731ec05','old-worker',NULL,0.0,0.0,0,'{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}',NULL,'{"type":"urn:reshard:error:job.attempts_exhausted","title":"Every allowed attempt was lost.","status":500,"detail":"1 attempts were lost; the last one: the store did not answer","code":"job.attempts_exhausted","fix":"look at the worker''s log for the cause, then submit the job again: finished work is kept","retryable":false,"details":{"attempts":1,"last_error":{"type":"urn:reshard:error:storage.unavailable","title":"The store timed out or throttled.","status":503,"detail":"the store did not answer","code":"storage.unavailable","fix":"look at the store","retryable":true,"details":{}}}}',NULL,4,1.79546544866698980333e+09,1.79546544867101311683e+09,1.79546544867499613764e+09);
INSERT INTO "jobs" VALUES('job_pqykcpgw2tejetsuv4t5cy3d','convert','CANCELLED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/cancelled-before","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}','/frozen/cancelled-before',0,3,0,NULL,NULL,NULL,0.0,0.0,1,NULL,NULL,NULL,NULL,2,1.79546544867600202559e+09,NULL,1.79546544867801380158e+09);
INSERT INTO "jobs" VALUES('job_7l7s25ztkb63x3ow2lkk7xk7','convert','CANCELLED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/cancelled","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}','/frozen/cancelled',1,3,0,'9402fc78ea4bfcbc4b83ad6eacb47bf2','old-worker',NULL,0.0,0.0,1,'{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}',NULL,NULL,NULL,5,1.79546544867998504636e+09,1.7954654486819968224e+09,1.79546544868799161907e+09);
INSERT INTO "jobs" VALUES('job_b3sy73p2pxoqndtmxeq4wkvd','convert','CANCELLING','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/cancelling","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}','/frozen/cancelling',1,3,0,'22411acfc9aade6cc4c8e7801be0c19a','old-worker',1.7954655086920146942e+09,0.0,0.0,1,'{"phase":"running","bytes_done":1,"bytes_total":100,"units_done":0,"units_total":0,"rate_bytes_per_s":0.0,"eta_s":null}',NULL,NULL,NULL,4,1.79546544868899726862e+09,1.79546544869100904466e+09,NULL);
INSERT INTO "jobs" VALUES('job_6wbmaspm7evqaaopdwazltvs','convert','QUEUED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/a-plan","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}','/frozen/a-plan',0,3,0,NULL,NULL,NULL,0.0,0.0,0,NULL,NULL,NULL,NULL,1,1.79546544869599795338e+09,NULL,NULL);
INSERT INTO "jobs" VALUES('job_z6ttaj3czzbtrmxzr325ouwx','plan','QUEUED','{"source":{"url":"/frozen/source","tag":null,"profile":null},"target":"/frozen/a-plan","to":"universal","target_profile":null,"dtype":null,"layout":null,"rules":null,"family":null,"names":null,"replicas":"error","max_shard_bytes":null,"exclude_frozen":false,"merge_adapter":false,"adapter":null,"lora_alpha":null,"base":null,"model_files":null,"opaque":"refuse","overwrite":false,"on_overflow":"inf","verify":"default","memory_limit_bytes":1073741824,"part_bytes":67108864,"threads":null,"server_copy":"auto"}','',0,3,0,NULL,NULL,NULL,0.0,0.0,0,NULL,NULL,NULL,NULL,1,1.79546544869901537897e+09,NULL,NULL);
CREATE TABLE reshard_meta (
	name VARCHAR(64) NOT NULL, 
	value TEXT NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "reshard_meta" VALUES('schema_version','1');
INSERT INTO "reshard_meta" VALUES('host','frozen');
CREATE INDEX jobs_by_state ON jobs (state, created_at);
CREATE INDEX jobs_by_target ON jobs (target);
CREATE INDEX jobs_by_age ON jobs (created_at, id);
CREATE INDEX job_labels_by_value ON job_labels (name, value);
COMMIT;
