package doctor

import "context"

type method = func(*examination, context.Context) finding

// newStep returns the step that calls a method.
func newStep(id, needs string, m method, why string) step {
	return step{id: id, needs: needs, why: why, run: func(ctx context.Context, x *examination) finding { return m(x, ctx) }}
}

// mongoSteps are the checks of the configuration and of MongoDB, in their order. The last step finds
// the topics for the checks of Kafka.
var mongoSteps = []step{
	newStep("config.sizes", "", (*examination).checkSizes, "limits that contradict each other show under load only"),
	newStep("config.topics", "", (*examination).checkAllowedTopics, "a service that may insert into the outbox may name any topic that is allowed"),
	newStep("config.certificates", "", (*examination).checkCertificates, "a certificate that expires ends every connection that is made after it"),
	newStep("mongodb", "", (*examination).checkConnection, "the outbox, the lease and the position are there: without it nothing runs"),
	newStep("mongodb.version", "mongodb", (*examination).checkVersion, "the change stream asks for what servers know since 6.0"),
	newStep("mongodb.replica_set", "mongodb", (*examination).checkReplicaSet, "only replica sets have change streams and transactions; one with a single member loses what its disk loses"),
	newStep("mongodb.arbiter", "mongodb", (*examination).checkArbiters, "with an arbiter, one member down stops majority commits and with them every delivery"),
	newStep("mongodb.access", "mongodb", (*examination).checkAccess, "the relay needs a user of its own with few privileges"),
	newStep("mongodb.clock", "mongodb", (*examination).checkClock, "leases and due times go by the server's clock; lag, logs and certificates by this one"),
	newStep("mongodb.write_concern", "mongodb", (*examination).checkWriteConcern, "an event written with less than majority can be rolled back after its writer was told it is safe"),
	newStep("mongodb.transactions", "mongodb", (*examination).checkTransactions, "the purge relies on no transaction being longer than half of its margin of 5 minutes"),
	newStep("mongodb.oplog", "mongodb", (*examination).checkOplog, "a relay that is away for longer than the oplog reaches back has to sweep the collections"),
	newStep("outbox.collections", "mongodb.access", (*examination).checkCollections, "what matches nothing is never delivered"),
	newStep("mongodb.privileges.stream", "mongodb.access", (*examination).checkStreamPrivileges, "without them the stream cannot be opened"),
	newStep("mongodb.privileges.outbox", "mongodb.access", (*examination).checkOutboxPrivileges, "the relay reads envelopes, writes the fate of those that fail, and removes what it moved"),
	newStep("mongodb.privileges.dead", "mongodb.access", (*examination).checkDeadPrivileges, "an envelope that can never be delivered goes there; without them it stops the stream"),
	newStep("mongodb.privileges.state", "mongodb.access", (*examination).checkStatePrivileges, "lease and position live there; without changeStream a standby polls instead of waking at once"),
	newStep("mongodb.privileges.cluster", "mongodb.access", (*examination).checkClusterPrivileges, "without serverStatus the oplog's window is not known, without replSetGetConfig copied state is not recognised"),
	newStep("outbox.indexes", "outbox.collections", (*examination).checkIndexes, "without them nothing is lost, but purge, sweeps and scheduled deliveries read whole collections"),
	newStep("outbox.claims", "mongodb.access", (*examination).checkRegistrations, "two watchers of one collection would publish it twice, and purge it under each other"),
	newStep("watcher", "mongodb.access", (*examination).checkWatcher, "one process at a time owns the watcher, and its document holds the place in the stream"),
	newStep("outbox.slots", "outbox.collections", (*examination).checkSlotFields, "an envelope without a slot is slot 0's, whatever its key"),
	newStep("topics", "outbox.collections", (*examination).findTopics, "the topics below follow from the rules and from the envelopes that are there"),
}

// kafkaSteps are the checks of Kafka, in their order.
var kafkaSteps = []step{
	newStep("kafka", "", (*examination).checkKafka, "the events go there"),
	newStep("kafka.brokers", "kafka", (*examination).checkBrokers, "with one broker each restart stops deliveries, and its disk holds the only copy"),
	newStep("kafka.transactional_id", "kafka", (*examination).checkTransactionalID, "the relay fences its predecessors by it: without it nothing is sent"),
	newStep("topics.exist", "kafka", (*examination).checkTopicsExist, "the events of a missing topic wait, and hold the position"),
	newStep("topics.acl", "kafka", ifTopicsKnown((*examination).checkACLs), "WRITE sends, READ reads back after a crash, the others show partitions and limits"),
	newStep("topics.replication", "kafka", ifTopicsKnown((*examination).checkReplication), "the only copy of a partition goes with its disk"),
	newStep("topics.min_insync_replicas", "kafka", ifTopicsKnown((*examination).checkMinISR), "below 2 an acknowledged event can be lost with one broker"),
	newStep("topics.unclean_election", "kafka", ifTopicsKnown((*examination).checkUncleanElection), "an unclean election throws acknowledged events away"),
	newStep("topics.max_message_bytes", "kafka", ifTopicsKnown((*examination).checkMaxBytes), "an event above it goes to the dead letters"),
	newStep("topics.cleanup_policy", "kafka", ifTopicsKnown((*examination).checkCleanupPolicy), "compaction keeps the last event of a key only, and a replay into it can bring back an older one"),
}

// ifTopicsKnown returns a check of topics that runs only if the topics are known. A missing topic does
// not prevent the check of the others.
func ifTopicsKnown(m method) method {
	return func(x *examination, ctx context.Context) finding {
		if root := x.findingOf("topics.exist").root; root != "" {
			return blockedBy(root)
		}
		return m(x, ctx)
	}
}
