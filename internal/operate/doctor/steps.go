package doctor

import "context"

// step is one check. It does not run if the check that it needs failed or could not run.
type step struct {
	id, needs string
	run       func(ctx context.Context) finding
	why       string
}

// mongoSteps returns the checks of the configuration and of MongoDB, in their order. The last step finds
// the topics for the checks of Kafka.
func mongoSteps(examination *examination) []step {
	config, mongo, privileges := configChecks{examination}, mongoChecks{examination}, privilegeChecks{examination}
	outbox, watcher := outboxChecks{examination}, watcherChecks{examination}
	return []step{
		{"config.sizes", "", config.checkSizes, "contradicting limits cause problems only under load"},
		{"config.topics", "", config.checkAllowedTopics, "a service that can insert into the outbox can send to any allowed topic"},
		{"config.platform", "", config.checkPlatform, "the tests run on one platform; see docs/support.md"},
		{"config.certificates", "", config.checkCertificates, "after a certificate expires, every new connection fails"},
		{"mongodb", "", mongo.checkConnection, "MongoDB stores the outbox, the lease and the position; without it the relay does not run"},
		{"mongodb.version", "mongodb", mongo.checkVersion, "the change stream uses options that MongoDB supports since 6.0"},
		{"mongodb.replica_set", "mongodb", mongo.checkReplicaSet, "only replica sets have change streams and transactions; with a single member, a lost disk loses the data"},
		{"mongodb.arbiter", "mongodb", mongo.checkArbiters, "with an arbiter, one failed member stops majority commits, and with them all deliveries"},
		{"mongodb.access", "mongodb", privileges.checkAccess, "the relay needs a dedicated user with few privileges"},
		{"mongodb.clock", "mongodb", mongo.checkClock, "leases and due times use the server's clock; lag, logs and certificates use the clock of this machine"},
		{"mongodb.write_concern", "mongodb", mongo.checkWriteConcern, "an event written with less than majority can be rolled back after the server has acknowledged it"},
		{"mongodb.transactions", "mongodb", mongo.checkTransactions, "the purge requires that no transaction is longer than half of its margin of 5 minutes"},
		{"mongodb.oplog", "mongodb", mongo.checkOplog, "if the relay is down for longer than the time window of the oplog, it has to sweep the collections"},
		{"outbox.collections", "mongodb.access", outbox.checkCollections, "the relay delivers only events of collections that match watch"},
		{"mongodb.privileges.stream", "mongodb.access", privileges.checkStreamPrivileges, "without them the relay cannot open the change stream"},
		{"mongodb.privileges.outbox", "mongodb.access", privileges.checkOutboxPrivileges, "the relay reads envelopes, records failed deliveries, and removes envelopes that it moved to the dead letters"},
		{"mongodb.privileges.dead", "mongodb.access", privileges.checkDeadPrivileges, "without these privileges, the dead letters of handlers are neither counted nor requeued"},
		{"mongodb.privileges.state", "mongodb.access", privileges.checkStatePrivileges, "the state database stores the lease and the position"},
		{"state", "mongodb.privileges.state", privileges.checkState, "the state database stores leases, positions and waiting events, and the relay rejects a collection that it did not create"},
		{"mongodb.privileges.cluster", "mongodb.access", privileges.checkClusterPrivileges, "the relay reads the time window of the oplog with serverStatus, and detects copied state with replSetGetConfig"},
		{"mongodb.writers", "mongodb.access", privileges.checkWriters, "a user who can write to the state database can move positions, and one who can write to an outbox can send events"},
		{"outbox.indexes", "outbox.collections", outbox.checkIndexes, "without the indexes nothing is lost, but purges, sweeps and scheduled deliveries read whole collections"},
		{"outbox.claims", "mongodb.access", outbox.checkRegistrations, "two watchers of one collection would send its events twice, and purge envelopes that the other one still needs"},
		{"outbox.unwatched", "mongodb.access", outbox.checkUnwatched, "a service with a wrong name of the database or the collection appends without an error, and its events are never sent"},
		{"watcher", "mongodb.access", watcher.checkWatcher, "one process at a time owns the watcher, and its document stores the position in the change stream"},
		{"outbox.slots", "outbox.collections", outbox.checkSlotFields, "an envelope without a slot belongs to slot 0, so its key can lose its order"},
		{"outbox.fields", "outbox.collections", outbox.checkFields, "the relay ignores unknown fields, so a field with a wrong name has no effect: a scheduled event is sent at once"},
		{"topics", "outbox.collections", outbox.findTopics, "doctor derives the topics from the rules and from the stored envelopes, and checks them below"},
	}
}

// kafkaSteps returns the checks of Kafka, in their order.
func kafkaSteps(examination *examination) []step {
	kafka, topics := kafkaChecks{examination}, topicChecks{examination}
	return []step{
		{"kafka", "", kafka.checkKafka, "the relay sends the events to Kafka"},
		{"kafka.brokers", "kafka", kafka.checkBrokers, "with one broker, each restart stops deliveries, and its disk holds the only copy"},
		{"kafka.request_size", "kafka", kafka.checkRequestSize, "a broker closes the connection of a larger request without a response; the relay then sends smaller ones, and moves larger records to the dead letters"},
		{"kafka.transactional_id", "kafka", kafka.checkTransactionalID, "the relay fences previous owners with its transactional id; without it the relay sends nothing"},
		{"topics.exist", "kafka", topics.checkTopicsExist, "the events of a missing topic wait, and the position does not advance"},
		{"topics.acl", "kafka", topics.ifKnown(topics.checkACLs), "WRITE sends events, READ reads them back after a crash, DESCRIBE and DESCRIBE_CONFIGS return partitions and limits"},
		{"topics.replication", "kafka", topics.ifKnown(topics.checkReplication), "a partition with one replica is lost with its disk"},
		{"topics.min_insync_replicas", "kafka", topics.ifKnown(topics.checkMinISR), "below 2, the loss of one broker can lose acknowledged events"},
		{"topics.unclean_election", "kafka", topics.ifKnown(topics.checkUncleanElection), "an unclean election discards acknowledged events"},
		{"topics.max_message_bytes", "kafka", topics.ifKnown(topics.checkMaxBytes), "the relay moves an event above this size to the dead letters"},
		{"topics.cleanup_policy", "kafka", topics.ifKnown(topics.checkCleanupPolicy), "compaction keeps only the last event of each key, and a replay can make an older event the last one"},
	}
}

// ifKnown returns a check of topics that runs only if the topics are known. A missing topic does not
// prevent the check of the others.
func (x topicChecks) ifKnown(check func(ctx context.Context) finding) func(ctx context.Context) finding {
	return func(ctx context.Context) finding {
		if root := x.findingOf("topics.exist").root; root != "" {
			return blockedBy(root)
		}
		return check(ctx)
	}
}
