package doctor

import "context"

type method = func(*examination, context.Context) finding

// check makes a step of a method.
func check(id, needs string, m method, why string) step {
	return step{id: id, needs: needs, why: why, run: func(ctx context.Context, x *examination) finding { return m(x, ctx) }}
}

// mongoSteps are the checks of the configuration and of MongoDB, in their order. The last finds out what the topics are.
var mongoSteps = []step{
	check("config.sizes", "", (*examination).sizes, "limits that contradict each other show under load only"),
	check("config.topics", "", (*examination).allowed, "a service that may insert into the outbox may name any topic that is allowed"),
	check("config.certificates", "", (*examination).certificates, "a certificate that expires ends every connection that is made after it"),
	check("mongodb", "", (*examination).reach, "the outbox, the lease and the position are there: without it nothing runs"),
	check("mongodb.version", "mongodb", (*examination).version, "the change stream asks for what servers know since 6.0"),
	check("mongodb.replica_set", "mongodb", (*examination).replicaSet, "only replica sets have change streams and transactions; one with a single member loses what its disk loses"),
	check("mongodb.arbiter", "mongodb", (*examination).arbiters, "with an arbiter, one member down stops majority commits and with them every delivery"),
	check("mongodb.access", "mongodb", (*examination).learnAccess, "the relay needs a user of its own with few privileges"),
	check("mongodb.clock", "mongodb", (*examination).clock, "leases and due times go by the server's clock; lag, logs and certificates by this one"),
	check("mongodb.write_concern", "mongodb", (*examination).writeConcern, "an event written with less than majority can be rolled back after its writer was told it is safe"),
	check("mongodb.transactions", "mongodb", (*examination).transactions, "the purge relies on no transaction being longer than half of its margin of 5 minutes"),
	check("mongodb.oplog", "mongodb", (*examination).oplog, "a relay that is away for longer than the oplog reaches back has to sweep the collections"),
	check("outbox.collections", "mongodb.access", (*examination).findOutboxes, "what matches nothing is never delivered"),
	check("mongodb.privileges.stream", "mongodb.access", (*examination).streamPrivileges, "without them the stream cannot be opened"),
	check("mongodb.privileges.outbox", "mongodb.access", (*examination).outboxPrivileges, "the relay reads envelopes, writes the fate of those that fail, and removes what it moved"),
	check("mongodb.privileges.dead", "mongodb.access", (*examination).deadPrivileges, "an envelope that can never be delivered goes there; without them it stops the stream"),
	check("mongodb.privileges.state", "mongodb.access", (*examination).statePrivileges, "lease and position live there; without changeStream a standby polls instead of waking at once"),
	check("mongodb.privileges.cluster", "mongodb.access", (*examination).clusterPrivileges, "without serverStatus the oplog's window is not known, without replSetGetConfig copied state is not recognised"),
	check("outbox.indexes", "outbox.collections", (*examination).indexes, "without them nothing is lost, but purge, sweeps and scheduled deliveries read whole collections"),
	check("outbox.claims", "mongodb.access", (*examination).claims, "two watchers of one collection would publish it twice, and purge it under each other"),
	check("watcher", "mongodb.access", (*examination).watcher, "one process at a time owns the watcher, and its document holds the place in the stream"),
	check("outbox.slots", "outbox.collections", (*examination).unslotted, "an envelope without a slot is slot 0's, whatever its key"),
	check("topics", "outbox.collections", (*examination).sample, "the topics below follow from the rules and from the envelopes that are there"),
}

// kafkaSteps are the checks of Kafka, in their order.
var kafkaSteps = []step{
	check("kafka", "", (*examination).reachKafka, "the events go there"),
	check("kafka.brokers", "kafka", (*examination).countBrokers, "with one broker each restart stops deliveries, and its disk holds the only copy"),
	check("kafka.transactional_id", "kafka", (*examination).transactionalID, "the relay fences its predecessors by it: without it nothing is sent"),
	check("topics.exist", "kafka", (*examination).existence, "the events of a missing topic wait, and hold the position"),
	check("topics.acl", "kafka", looked((*examination).permissions), "WRITE sends, READ reads back after a crash, the others show partitions and limits"),
	check("topics.replication", "kafka", looked((*examination).replication), "the only copy of a partition goes with its disk"),
	check("topics.min_insync_replicas", "kafka", looked((*examination).minISR), "below 2 an acknowledged event can be lost with one broker"),
	check("topics.unclean_election", "kafka", looked((*examination).unclean), "an unclean election throws acknowledged events away"),
	check("topics.max_message_bytes", "kafka", looked((*examination).maxBytes), "an event above it goes to the dead letters"),
	check("topics.cleanup_policy", "kafka", looked((*examination).cleanup), "compaction keeps the last event of a key only, and a replay into it can bring back an older one"),
}

// looked is a check of topics that runs unless nothing could be learnt of them; one that is missing hinders no other.
func looked(m method) method {
	return func(x *examination, ctx context.Context) finding {
		if root := x.earlier("topics.exist").root; root != "" {
			return because(root)
		}
		return m(x, ctx)
	}
}
