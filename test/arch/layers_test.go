package arch

// layer is a part of the module: the packages below its directories, except those of a longer directory of another layer. Imports go down to
// the layers above it in the table, or stay on the layer.
type layer struct {
	dirs []string
	why  string

	apart  bool // its packages do not import each other
	public bool // imports nothing below internal/
}

// houses are the directories of internal/. Each has one purpose. A package that fits none of them is a reason to think, not to add a house.
var houses = map[string]string{
	"base":      "tools without knowledge of outrelay: waiting, logging, metrics, health, crash points",
	"contract":  "what services, relay and operators agree on: envelope, record, routing, configuration",
	"mongodb":   "statements, transactions and indexes on MongoDB, whoever uses them",
	"kafkawire": "the protocol of Kafka: connections, requests, batches, error codes",
	"service":   "what runs inside services, below pkg: appending, inbox, retries, sagas, consumer groups",
	"relay":     "from the change stream to Kafka; its engine is below relay/internal, which only the relay can import",
	"operate":   "use cases of operators, for CLI, API, page and doctor",
	"lab":       "what tries, measures and prepares: servers, real and imitated, contract suites, scenarios, benchmarks, importers",
}

// layers is the map of the module, from the ground up.
var layers = []layer{
	{dirs: []string{"resume"}, why: "a public leaf: tokens and positions for any user of change streams"},
	{dirs: []string{"internal/base"}, why: "does not know what an event is"},
	{dirs: []string{"internal/contract"}, why: "values and their checks, without I/O"},
	{dirs: []string{"internal/mongodb"}, why: "does not know what a watcher is"},
	{dirs: []string{"internal/kafkawire"}, why: "does not know what a watcher is"},
	{dirs: []string{"pkg/event", "pkg/codec", "pkg/telemetry", "pkg/bearer"}, why: "values of services: no server, few dependencies"},
	{dirs: []string{"internal/service"}, why: "what the public packages are made of, and the stores that operators read as well"},
	{dirs: []string{"pkg/outbox", "pkg/inbox", "pkg/consumer", "pkg/entity", "pkg/saga"}, why: "runs inside services of users"},
	{dirs: []string{
		"internal/relay/activity", "internal/relay/changes", "internal/relay/connect", "internal/relay/figures", "internal/relay/notices", "internal/relay/problems", "internal/relay/readiness", "internal/relay/stored", "internal/relay/tracing",
	}, why: "what the relay stores, reports and connects to: the only way from operators to a relay"},
	{dirs: []string{"internal/relay/internal/fence", "internal/relay/internal/ledger", "internal/relay/internal/watched", "internal/relay/internal/resolved"}, why: "what the stages of a term share: fencing, outcomes, collections, positions"},
	{dirs: []string{"internal/relay/internal"}, apart: true, why: "the stages: each gets the others as interfaces"},
	{dirs: []string{"internal/relay/internal/term"}, why: "one term of ownership: makes the stages and connects them"},
	{dirs: []string{"internal/relay"}, why: "the doors: one process, its probes, and what commands do while none runs"},
	{dirs: []string{"pkg/relay"}, why: "the relay inside a service; links nothing of operators"},
	{dirs: []string{"internal/operate", "pkg/operate"}, why: "thin layers over use cases, also for services"},
	{dirs: []string{"internal/lab"}, why: "uses everything; a release contains only what its commands need"},
	{dirs: []string{"pkg/outboxtest", "pkg/servertest", "examples/orders/servers"}, why: "for tests of users"},
	{dirs: []string{"cmd"}, why: "parses flags, creates the log and the metrics, prints"},
	{dirs: []string{"examples"}, public: true, why: "code that a user can write"},
	{dirs: []string{"test"}, why: "tests across packages"},
}
