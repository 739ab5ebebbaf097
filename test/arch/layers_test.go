package arch

// room is a directory with the packages below it that share its rules. A package belongs to the room
// with the longest matching directory, and may always import the other packages of its room.
type room struct {
	dir   string
	layer int // imports go from a higher layer to a lower one
	why   string

	also      []string // rooms of the same or a higher layer that it may import as well
	only      []string // if not nil: the only rooms that it may import, in any layer
	testsOnly bool     // only test files, the packages below test/ and other rooms of this kind may import it
}

var none = []string{}

// rooms is the map of the module. A package outside of it fails the test: give it a room.
var rooms = []room{
	// Layer 0: vocabulary and tools. They do not depend on the rest of the project.
	{dir: "internal/record", layer: 0, only: none, why: "the vocabulary of the stages"},
	{dir: "internal/keyhash", layer: 0, only: none, why: "the hash of keys that selects partitions and slots"},
	{dir: "internal/envelope", layer: 0, only: []string{"internal/record", "internal/keyhash"}, why: "reads stored envelopes: for the relay, the memory relay and restored events; services see pkg/event only"},
	{dir: "internal/eventid", layer: 0, only: []string{"internal/envelope"}, why: "the id of an event, for services, stored documents and operators"},
	{dir: "internal/crash", layer: 0, only: none, why: "points at which a test may kill the process"},
	{dir: "internal/glob", layer: 0, only: none, why: "the patterns of watch, topics, rules and handlers"},
	{dir: "internal/retry", layer: 0, only: none, why: "the only implementation of back-off"},
	{dir: "internal/sasl", layer: 0, only: none, why: "the table of SASL mechanisms, with their implementation for all clients of Kafka"},
	{dir: "internal/mailbox", layer: 0, only: []string{"internal/retry"}, why: "values from any goroutine for one"},
	{dir: "internal/schema", layer: 0, only: []string{"internal/retry"}, why: "changes of collections that do not keep writers waiting"},
	{dir: "internal/usage", layer: 0, only: none, why: "what the collections of a process are used for, for packages of services"},
	{dir: "internal/concern", layer: 0, only: none, why: "the write concern of services and of the relay"},
	{dir: "internal/cursor", layer: 0, only: none, why: "the documents of a statement, for services and the relay"},
	{dir: "internal/unit", layer: 0, only: none, why: "one attempt of a transaction, for services and for tests against the memory"},
	{dir: "internal/hold", layer: 0, only: none, why: "one handler at a time, while a lease is renewed"},
	{dir: "internal/metrics", layer: 0, only: []string{"internal/metrics/catalog"}, also: []string{"internal/metrics/catalog"}, why: "the metric set; the stages receive it"},
	{dir: "internal/metrics/catalog", layer: 0, only: none, why: "the texts of all metrics, also of those of services"},
	{dir: "internal/activity", layer: 0, only: []string{"internal/record"}, why: "the recent deliveries of an owner, in memory; the process stores its reports"},
	{dir: "internal/logging", layer: 0, only: none, why: "the handler of slog; only the entry of the process selects it"},
	{dir: "internal/tracing", layer: 0, only: []string{"internal/record"}, why: "spans of the relay itself, of records"},
	{dir: "pkg/telemetry", layer: 0, only: []string{"internal/metrics/catalog", "pkg/event"}, why: "metrics and spans of services, without the types of their libraries"},
	{dir: "internal/appending", layer: 0, only: []string{"internal/record", "pkg/event", "pkg/telemetry"}, why: "from the events of a call to envelopes; no spans, no SDK, no server"},
	{dir: "internal/health", layer: 0, only: none, why: "rules over counts; other packages count"},
	{dir: "internal/systemd", layer: 0, only: []string{"internal/logging"}, why: "notifications to a service manager; masks secrets in reasons"},
	{dir: "pkg/bearer", layer: 0, only: none, why: "tokens of a login to Kafka"},
	{dir: "pkg/bearer/msk", layer: 0, only: []string{"pkg/bearer"}, also: []string{"pkg/bearer"}, why: "tokens of Amazon MSK: links the AWS SDK"},
	{dir: "pkg/codec", layer: 0, only: []string{"internal/envelope"}, why: "formats of payloads; each library of a format has its own package"},
	{dir: "pkg/codec/protobuf", layer: 0, only: []string{"pkg/codec"}, why: "payloads in Protobuf; links its library"},
	{dir: "pkg/codec/registry", layer: 0, only: []string{"pkg/codec"}, why: "the only package that links a schema registry, Avro and JSON Schema"},
	{dir: "pkg/event", layer: 0, only: []string{"pkg/codec", "internal/envelope", "internal/eventid", "internal/keyhash", "internal/record"}, why: "the envelope is a value: services import it, so it has few dependencies"},

	// Layer 1: packages that need no lease.
	{dir: "resume", layer: 1, only: none, why: "a public leaf: tokens and positions for any user of change streams"},
	{dir: "internal/agenda", layer: 1, only: []string{"pkg/event", "internal/envelope"}, why: "scheduled events as services and operators see them"},
	{dir: "internal/transaction", layer: 1, only: []string{"internal/concern", "internal/unit"}, why: "transactions of services, which the packages of pkg join"},
	{dir: "internal/boxparts", layer: 1, only: []string{"internal/agenda", "internal/appending", "pkg/event"}, why: "what packages of the module need of an outbox.Box, and services do not"},
	{dir: "pkg/outbox", layer: 1, only: []string{"internal/concern", "internal/cursor", "pkg/event", "internal/appending", "internal/transaction", "internal/boxparts", "internal/agenda", "pkg/telemetry"}, why: "runs inside services of users: no library for metrics, no Kafka"},
	{dir: "internal/boxtest", layer: 2, only: []string{"pkg/outbox", "pkg/event", "internal/envelope", "internal/keyhash"}, testsOnly: true, why: "the contract of an outbox, for both stores"},
	{dir: "pkg/outbox/cron", layer: 2, only: []string{"internal/cursor", "pkg/event", "pkg/outbox", "internal/transaction", "internal/boxparts"}, why: "recurring events: a service without them does not link the parser of expressions"},
	{dir: "pkg/outbox/guard", layer: 2, only: []string{"internal/concern", "pkg/outbox", "internal/transaction"}, why: "writes that miss their transaction"},
	{dir: "internal/routing", layer: 1, why: "from an envelope to its records, without I/O"},
	{dir: "internal/slot", layer: 1, only: []string{"internal/keyhash"}, why: "the arithmetic of a split watcher, without I/O"},
	{dir: "internal/watermark", layer: 1, only: []string{"internal/record"}, why: "bookkeeping only; uses no server"},
	{dir: "internal/config", layer: 1, also: []string{"internal/routing", "internal/slot"}, why: "checks rules with their parser"},

	// Layer 2: statements on MongoDB that belong to the owner.
	{dir: "internal/lease", layer: 2, why: "the watcher document"},
	{dir: "internal/mongodb", layer: 1, why: "statements on MongoDB that do not depend on envelopes; gets the fence as an interface"},
	{dir: "internal/state", layer: 2, also: []string{"internal/config", "internal/mongodb", "internal/letters", "internal/waiting"}, why: "the state database: its prefix, its collections, its marker"},
	{dir: "internal/state/statetest", layer: 4, testsOnly: true, also: []string{"internal/devstack/stacktest"}, why: "a state database for a single test"},
	{dir: "internal/changes", layer: 2, why: "the vocabulary of change streams: scopes, events, batches, starts and ends"},
	{dir: "internal/sweep", layer: 2, also: []string{"internal/changes", "internal/outboxes"}, why: "reads the envelopes of a lost stretch from the outbox collections"},
	{dir: "internal/divisions", layer: 2, also: []string{"internal/lease", "internal/state"}, why: "the stored number of slots of each watcher"},
	{dir: "internal/outboxes", layer: 2, why: "the outbox collections, who reads each, and the states of their envelopes"},
	{dir: "internal/nodes", layer: 2, also: []string{"internal/state"}, why: "the running nodes and their log"},
	{dir: "internal/waiting", layer: 2, also: []string{"internal/outboxes"}, why: "the store of waiting envelopes, in the state database"},
	{dir: "internal/letters", layer: 2, also: []string{"internal/outboxes", "internal/lease"}, why: "the dead letters of the relay, in the state database"},
	{dir: "internal/kafkawire", layer: 2, only: []string{"internal/record", "internal/keyhash", "internal/sasl"}, why: "the protocol of Kafka, for the relay and for consumers: connections, requests, batches, error codes"},
	{dir: "internal/inbox", layer: 2, why: "the decisions about handled messages: marks, claims, watermarks of lanes, generations"},
	{dir: "internal/inbox/inboxtest", layer: 2, only: []string{"internal/inbox", "pkg/outbox"}, testsOnly: true, why: "the contract of an inbox, for both stores"},
	{dir: "internal/transport", layer: 2, only: []string{"internal/inbox", "internal/retry", "internal/record", "internal/kafkawire", "internal/sasl", "pkg/event"}, why: "how a consumer joins a group, reads and publishes; one package for each library that joins groups"},
	{dir: "internal/transport/franz", layer: 3, only: []string{"internal/kafkawire", "internal/record", "internal/retry", "internal/sasl", "internal/transport"}, why: "the only package that links franz-go for consumers; pkg/consumer/franz selects it"},
	{dir: "internal/transport/transporttest", layer: 2, only: []string{"internal/transport", "internal/keyhash", "pkg/event"}, testsOnly: true, why: "the contract of a transport, for Kafka and memory"},
	{dir: "internal/entityparts", layer: 2, only: []string{"pkg/event"}, why: "what packages of the module need to store entities elsewhere, and services do not"},
	{dir: "internal/consumerparts", layer: 2, only: []string{"internal/inbox", "internal/transport"}, why: "what packages of the module need of a consumer.Consumer, and services do not"},
	{dir: "internal/sagas", layer: 2, only: []string{"internal/concern", "internal/schema", "internal/cursor"}, why: "the stored sagas, for their steps and for operators; statements on MongoDB only"},
	{dir: "internal/setaside", layer: 2, only: []string{"internal/schema", "internal/cursor", "internal/mongodb"}, why: "the messages of consumers that wait for a retry; statements on MongoDB only"},
	{dir: "internal/letterlist", layer: 0, only: none, why: "the queries of lists of dead letters, for the relay and for consumers, as BSON"},
	{dir: "internal/letterparts", layer: 2, only: []string{"internal/cursor"}, why: "what packages of the module need of a deadletter.Desk, and services do not"},
	{dir: "pkg/consumer/deadletter", layer: 2, only: []string{"internal/concern", "internal/letterlist", "internal/cursor", "internal/letterparts", "internal/setaside", "internal/schema", "internal/transaction", "internal/record", "pkg/event", "pkg/outbox"}, why: "the dead letters of handlers; MongoDB only, so that operators' tools need no Kafka"},
	{dir: "internal/setaside/setasidetest", layer: 2, only: []string{"internal/setaside"}, testsOnly: true, why: "the contract of a store of such messages, for MongoDB and memory"},

	{dir: "pkg/inbox", layer: 3, only: []string{"internal/inbox"}, why: "an effect once, for webhooks and idempotency keys; a thin layer over the decisions"},

	// Layer 3: the stages. They do not import each other, but use interfaces that the caller declares.
	{dir: "internal/changestream", layer: 3, why: "reads; does not use Kafka"},
	{dir: "internal/pipeline", layer: 3, also: []string{"internal/ledger"}, why: "from an event to the sink and back from its acks: builds records, orders and limits events in flight; uses no server"},
	{dir: "internal/fence", layer: 3, why: "takes a transactional id over, and reads back"},
	{dir: "internal/sink", layer: 3, also: []string{"internal/fence"}, why: "sends records in order; opens with a takeover"},
	{dir: "internal/slots", layer: 3, also: []string{"internal/fence"}, why: "how many slots a watcher has, and which node owns them"},
	{dir: "internal/readiness", layer: 2, also: []string{"internal/lease"}, why: "the role and the problems of a process or slot; calls that are repeated until they succeed"},
	{dir: "internal/watched", layer: 3, why: "the collections that a term watches, and which of these contain work"},
	{dir: "internal/gap", layer: 3, also: []string{"internal/watched"}, why: "lost history: the sweep over a lost stretch of the stream, and the order around it"},
	{dir: "internal/ledger", layer: 3, why: "the outcomes of sends: one queue, one fenced writer, the policy for rejected writes"},
	{dir: "internal/reconciler", layer: 3, also: []string{"internal/ledger"}, why: "sends waiting envelopes when their turn comes"},
	{dir: "internal/scheduled", layer: 3, also: []string{"internal/ledger"}, why: "envelopes with a due time: into the store of waiting ones, and sent when they are due"},
	{dir: "internal/purge", layer: 3, why: "what becomes of delivered envelopes: records of deliveries, their history, and the purge"},
	{dir: "internal/requeues", layer: 3, why: "dead letters back to the waiting envelopes, as operators order it"},
	{dir: "internal/admin", layer: 3, also: []string{"pkg/saga", "internal/requeues", "internal/purge"}, why: "use-cases behind the CLI, the API and the page; a dry run counts by the conditions of the sweep"},
	{dir: "internal/admin/admintest", layer: 3, testsOnly: true, why: "data for tests of the operators' views"},
	{dir: "pkg/consumer/topics", layer: 2, why: "topics of a group that may change while it runs"},
	{dir: "pkg/consumer", layer: 3, why: "from Kafka to handlers"},
	{dir: "pkg/consumer/franz", layer: 3, only: []string{"pkg/consumer", "internal/consumerparts", "internal/transport", "internal/transport/franz"}, why: "joins groups with franz-go, for services that want it"},
	{dir: "pkg/consumer/breaker", layer: 3, also: []string{"pkg/consumer"}, why: "middleware that suspends handlers while a dependency fails"},
	{dir: "pkg/consumer/bodycrypt", layer: 3, also: []string{"pkg/consumer"}, why: "middleware that encrypts payloads"},
	{dir: "pkg/consumer/bodystore", layer: 3, also: []string{"pkg/consumer"}, why: "middleware that keeps large payloads outside of Kafka"},
	{dir: "pkg/entity", layer: 3, also: []string{"pkg/consumer"}, why: "documents and their events in one transaction; the projector is a handler"},
	{dir: "pkg/saga", layer: 3, also: []string{"pkg/consumer"}, why: "a saga is a consumer with a state"},
	{dir: "internal/entitytest", layer: 4, only: []string{"internal/entityparts", "pkg/entity", "pkg/event", "pkg/outbox"}, testsOnly: true, why: "the contract of the documents of entities, for both stores"},
	{dir: "internal/sagatest", layer: 4, only: []string{"internal/sagas", "pkg/saga", "pkg/consumer", "pkg/event", "pkg/outbox"}, testsOnly: true, why: "the contract of a store of sagas, for both stores"},

	// Layer 4: packages that connect the stages.
	{dir: "internal/connect", layer: 4, why: "the configured servers and collections, for the relay and for commands"},
	{dir: "internal/offline", layer: 4, also: []string{"internal/connect"}, why: "what commands do with the means of a relay while none needs to run"},
	{dir: "internal/adopt", layer: 4, also: []string{"internal/connect", "internal/offline"}, why: "takes over the position of another publisher"},
	{dir: "internal/importing", layer: 4, also: []string{"internal/connect"}, why: "pending rows of other outbox libraries as envelopes"},
	{dir: "internal/term", layer: 4, also: []string{"internal/connect"}, why: "one term of ownership: takes over, reads, drains, releases"},
	{dir: "internal/setup", layer: 4, also: []string{"internal/connect"}, why: "creates what a relay needs, for users whose relay may create nothing"},
	{dir: "internal/process", layer: 4, also: []string{"internal/connect", "internal/probes", "internal/term"}, why: "one relay process: builds the slots and runs them together with heartbeat, health and figures"},
	{dir: "internal/probes", layer: 4, only: []string{"internal/health"}, why: "health and metrics over HTTP, also in programs without the operators' page"},
	{dir: "internal/httpapi", layer: 4, only: []string{"internal/admin", "internal/logging", "internal/probes"}, why: "a thin layer over the use-cases; masks secrets in reasons"},
	{dir: "internal/operators", layer: 4, also: []string{"internal/connect", "internal/offline", "internal/process", "internal/httpapi", "internal/opspage", "internal/probes"}, why: "page and API of one deployment; the embedded relay does not link it"},
	{dir: "internal/opspage", layer: 4, only: []string{"internal/admin"}, why: "a thin layer over the use-cases"},
	{dir: "internal/devstack", layer: 4, only: []string{"internal/retry", "internal/sasl"}, why: "real servers on this machine; independent of the relay"},
	{dir: "internal/devstack/stacktest", layer: 4, only: []string{"internal/devstack"}, testsOnly: true, why: "databases and topics for a single test"},
	{dir: "internal/doctor", layer: 4, also: []string{"internal/connect", "internal/offline"}, why: "checks with the same connections as the relay"},
	{dir: "internal/demo", layer: 4, also: []string{"internal/devstack", "internal/operators", "internal/doctor"}, why: "outrelay dev; explains given servers that cannot be used in the words of the doctor"},
	{dir: "internal/bench", layer: 4, also: []string{"internal/devstack", "internal/connect"}, why: "outrelay bench"},
	{dir: "internal/memory", layer: 4, why: "the surroundings of a service without servers, with the contracts of the packages that it replaces", only: []string{
		"internal/agenda", "internal/boxparts", "internal/transaction", "internal/unit", "pkg/event", "pkg/outbox", "internal/inbox", "pkg/inbox", "internal/consumerparts", "internal/transport", "pkg/entity", "internal/entityparts", "internal/sagas", "internal/setaside", "internal/letterparts", "pkg/consumer/deadletter", "internal/record", "internal/envelope", "internal/keyhash", "internal/routing", "internal/appending",
	}},
	{dir: "pkg/outboxtest", layer: 5, testsOnly: true, why: "unit tests of services; links no server", only: []string{
		"internal/memory", "internal/boxparts", "internal/consumerparts", "internal/transport", "internal/envelope", "internal/routing", "pkg/event", "pkg/outbox", "pkg/inbox", "pkg/consumer", "pkg/consumer/deadletter", "pkg/entity",
	}},
	{dir: "pkg/servertest", layer: 5, testsOnly: true, only: []string{"internal/devstack/stacktest", "pkg/consumer", "pkg/relay"}, why: "integration tests of services: links all that starts servers"},
	{dir: "pkg/relay", layer: 4, also: []string{"internal/process"}, why: "the watcher inside another program"},

	// Layer 5: programs.
	{dir: "cmd", layer: 5, why: "parses flags, creates the log and metric set, prints; the work is in lower layers", only: []string{
		"internal/connect", "internal/offline", "internal/process", "internal/operators", "internal/devstack", "internal/doctor", "internal/demo", "internal/bench", "pkg/bearer/msk",
		"internal/config", "internal/envelope", "internal/logging", "internal/admin", "internal/adopt", "internal/importing", "internal/setup", "internal/state", "internal/outboxes",
	}},
	{dir: "examples/orders/servers", layer: 4, only: []string{"internal/devstack"}, why: "real servers for the example that starts itself; not part of a service"},
	{dir: "examples/local", layer: 4, why: "addresses of servers for the small examples"},
	{dir: "examples", layer: 5, why: "code that a user can write", only: []string{
		"pkg/codec", "pkg/event", "pkg/outbox", "pkg/inbox", "pkg/consumer", "pkg/entity", "pkg/saga", "pkg/relay", "examples/orders/servers", "examples/local",
		"pkg/consumer/bodystore", "pkg/outbox/cron", "pkg/codec/registry",
	}},

	// Tests across packages.
	{dir: "test/generated", layer: 0, only: none, testsOnly: true, why: "files of the repository that tests make from the code"},
	{dir: "test", layer: 6, why: "may import everything"},
}
