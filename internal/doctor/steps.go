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
func mongoSteps(x *examination) []step {
	config, mongo, privileges := configChecks{x}, mongoChecks{x}, privilegeChecks{x}
	outbox, watcher := outboxChecks{x}, watcherChecks{x}
	return []step{
		{"config.sizes", "", config.checkSizes, "limits that contradict each other show under load only"},
		{"config.topics", "", config.checkAllowedTopics, "a service that may insert into the outbox may name any topic that is allowed"},
		{"config.certificates", "", config.checkCertificates, "a certificate that expires ends every connection that is made after it"},
		{"mongodb", "", mongo.checkConnection, "the outbox, the lease and the position are there: without it nothing runs"},
		{"mongodb.version", "mongodb", mongo.checkVersion, "the change stream asks for what servers know since 6.0"},
		{"mongodb.replica_set", "mongodb", mongo.checkReplicaSet, "only replica sets have change streams and transactions; one with a single member loses what its disk loses"},
		{"mongodb.arbiter", "mongodb", mongo.checkArbiters, "with an arbiter, one member down stops majority commits and with them every delivery"},
		{"mongodb.access", "mongodb", privileges.checkAccess, "the relay needs a user of its own with few privileges"},
		{"mongodb.clock", "mongodb", mongo.checkClock, "leases and due times go by the server's clock; lag, logs and certificates by this one"},
		{"mongodb.write_concern", "mongodb", mongo.checkWriteConcern, "an event written with less than majority can be rolled back after its writer was told it is safe"},
		{"mongodb.transactions", "mongodb", mongo.checkTransactions, "the purge relies on no transaction being longer than half of its margin of 5 minutes"},
		{"mongodb.oplog", "mongodb", mongo.checkOplog, "a relay that is away for longer than the oplog reaches back has to sweep the collections"},
		{"outbox.collections", "mongodb.access", outbox.checkCollections, "what matches nothing is never delivered"},
		{"mongodb.privileges.stream", "mongodb.access", privileges.checkStreamPrivileges, "without them the stream cannot be opened"},
		{"mongodb.privileges.outbox", "mongodb.access", privileges.checkOutboxPrivileges, "the relay reads envelopes, writes the fate of those that fail, and removes what it moved"},
		{"mongodb.privileges.dead", "mongodb.access", privileges.checkDeadPrivileges, "an envelope that can never be delivered goes there; without them it stops the stream"},
		{"mongodb.privileges.state", "mongodb.access", privileges.checkStatePrivileges, "lease and position live there; without changeStream a standby polls instead of waking at once"},
		{"mongodb.privileges.cluster", "mongodb.access", privileges.checkClusterPrivileges, "without serverStatus the oplog's window is not known, without replSetGetConfig copied state is not recognised"},
		{"outbox.indexes", "outbox.collections", outbox.checkIndexes, "without them nothing is lost, but purge, sweeps and scheduled deliveries read whole collections"},
		{"outbox.claims", "mongodb.access", outbox.checkRegistrations, "two watchers of one collection would publish it twice, and purge it under each other"},
		{"watcher", "mongodb.access", watcher.checkWatcher, "one process at a time owns the watcher, and its document holds the place in the stream"},
		{"outbox.slots", "outbox.collections", outbox.checkSlotFields, "an envelope without a slot is slot 0's, whatever its key"},
		{"topics", "outbox.collections", outbox.findTopics, "the topics below follow from the rules and from the envelopes that are there"},
	}
}

// kafkaSteps returns the checks of Kafka, in their order.
func kafkaSteps(x *examination) []step {
	kafka, topics := kafkaChecks{x}, topicChecks{x}
	return []step{
		{"kafka", "", kafka.checkKafka, "the events go there"},
		{"kafka.brokers", "kafka", kafka.checkBrokers, "with one broker each restart stops deliveries, and its disk holds the only copy"},
		{"kafka.transactional_id", "kafka", kafka.checkTransactionalID, "the relay fences its predecessors by it: without it nothing is sent"},
		{"topics.exist", "kafka", topics.checkTopicsExist, "the events of a missing topic wait, and hold the position"},
		{"topics.acl", "kafka", topics.ifKnown(topics.checkACLs), "WRITE sends, READ reads back after a crash, the others show partitions and limits"},
		{"topics.replication", "kafka", topics.ifKnown(topics.checkReplication), "the only copy of a partition goes with its disk"},
		{"topics.min_insync_replicas", "kafka", topics.ifKnown(topics.checkMinISR), "below 2 an acknowledged event can be lost with one broker"},
		{"topics.unclean_election", "kafka", topics.ifKnown(topics.checkUncleanElection), "an unclean election throws acknowledged events away"},
		{"topics.max_message_bytes", "kafka", topics.ifKnown(topics.checkMaxBytes), "an event above it goes to the dead letters"},
		{"topics.cleanup_policy", "kafka", topics.ifKnown(topics.checkCleanupPolicy), "compaction keeps the last event of a key only, and a replay into it can bring back an older one"},
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
