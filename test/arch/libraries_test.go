package arch

// library lists the directories that may use a library in files that are not tests. Tests may use any library.
type library struct {
	path string // the import path or its beginning; the longest match counts
	why  string

	in        []string // directories that may import it; nil: all except never
	never     []string // directories that may not
	testsOnly bool
}

// libraries are all libraries that the module may import. A new one needs a line with a reason.
var libraries = []library{
	{path: "go.mongodb.org/mongo-driver/v2/mongo", never: []string{
		"internal/contract/record", "internal/contract/envelope", "pkg/codec", "pkg/event", "internal/contract/routing", "internal/relay/internal/resolved", "internal/relay/internal/pipeline", "internal/kafkawire", "internal/relay/internal/sink", "internal/relay/internal/fence", "internal/base/metrics", "internal/base/logging", "internal/operate/opspage",
	}, why: "statements on MongoDB live in stages that are about MongoDB"},
	{path: "go.mongodb.org/mongo-driver/v2/x/mongo/driver/connstring", in: []string{"internal/contract/config"}, why: "the parser of connection strings, which the stable part does not export"},
	{path: "go.mongodb.org/mongo-driver/v2/x/mongo/driver", in: []string{"internal/mongodb"}, why: "the errors of documents that are too large and of commands that the driver repeats, which the stable part does not export"},
	{path: "go.mongodb.org/mongo-driver/v2/x", in: none, why: "the unstable parts of the driver"},
	{path: "go.mongodb.org/mongo-driver/v2", never: []string{"internal/contract/record", "internal/relay/internal/resolved", "internal/operate/opspage"}, why: "BSON values"},
	{path: "github.com/segmentio/kafka-go", in: []string{"internal/kafkawire", "internal/service/transport", "internal/lab/devstack", "internal/lab/bench", "internal/contract/sasl"}, why: "one package of the relay uses the library; internal/service/transport joins groups with it"},
	{path: "github.com/lmittmann/tint", in: []string{"internal/base/logging"}, why: "colors on a terminal; everything else uses slog"},
	{path: "github.com/cenkalti/backoff", in: []string{"internal/base/retry"}, why: "one back-off policy in one package"},
	{path: "github.com/spf13/cobra", in: []string{"cmd"}, why: "the command line"},
	{path: "github.com/spf13/pflag", in: []string{"cmd"}, why: "the command line"},
	{path: "github.com/knadh/koanf", in: []string{"internal/contract/config"}, why: "file, environment and flags in one tree"},
	{path: "github.com/agnivade/levenshtein", in: []string{"internal/contract/config"}, why: "the nearest name to a misspelled one"},
	{path: "go.yaml.in/yaml", in: []string{"internal/contract/config", "cmd", "internal/lab/demo"}, why: "configuration is YAML"},
	{path: "github.com/prometheus", in: []string{"internal/base/metrics", "internal/relay/probes", "internal/relay/tracing"}, why: "stages count with the set that they receive"},
	{path: "go.opentelemetry.io/otel", in: []string{"internal/lab/boxtest", "pkg/telemetry", "internal/relay/tracing"}, why: "trace context in and out"},
	{path: "go.opentelemetry.io/contrib/bridges/prometheus", in: []string{"internal/relay/tracing"}, why: "one set of metrics, two ways out"},
	{path: "github.com/coreos/go-systemd", in: []string{"internal/base/systemd"}, why: "the protocol of the service manager"},
	{path: "github.com/danielgtaylor/huma", in: []string{"internal/operate/httpapi"}, why: "operations, their checks and their description from one declaration"},
	{path: "github.com/google/uuid", why: "UUID v7 event ids and names of instances"},
	{path: "google.golang.org/protobuf", in: []string{"pkg/codec/protobuf", "pkg/codec/registry"}, why: "payloads in Protobuf, for services that want them"},
	{path: "github.com/twmb/franz-go/pkg/sr", in: []string{"pkg/codec/registry"}, why: "the client of schema registries, for services that want them"},
	{path: "github.com/twmb/franz-go/pkg/kgo", in: []string{"internal/service/transport/franz"}, why: "cooperative rebalances and static members, for services that want them"},
	{path: "github.com/twmb/franz-go/pkg/kmsg", in: []string{"internal/service/transport/franz"}, why: "its messages"},
	{path: "github.com/twmb/franz-go/pkg/sasl", in: []string{"internal/service/transport/franz"}, why: "its logins"},
	{path: "golang.org/x/oauth2", in: []string{"pkg/bearer"}, why: "tokens of an authorization server"},
	{path: "github.com/aws", in: []string{"pkg/bearer/msk"}, why: "tokens of Amazon MSK, for the program and services that want them"},
	{path: "github.com/twmb/avro", in: []string{"pkg/codec/registry"}, why: "payloads in Avro, for services that want them"},
	{path: "github.com/robfig/cron", in: []string{"pkg/outbox/cron"}, why: "cron expressions of recurring events"},
	{path: "golang.org/x/sync", why: "errgroup"},
	{path: "golang.org/x/sys", in: []string{"internal/kafkawire", "internal/relay/stored/lease", "internal/lab/devstack"}, why: "the clock that runs during a suspend, bytes of a connection that were not received, process groups, memory of a process"},
	{path: "golang.org/x/crypto/ocsp", in: []string{"internal/relay/connect"}, why: "the revocation status that a server staples to its certificate"},
	{path: "golang.org/x/crypto/x509roots/fallback", in: []string{"cmd"}, why: "certificate authorities where the system has none, as in the image of a release"},
	{path: "golang.org/x/term", in: []string{"cmd", "internal/lab/demo"}, why: "keys and width of a terminal"},
	{path: "github.com/mattn/go-isatty", in: []string{"internal/base/logging"}, why: "terminal or not"},
	{path: "github.com/klauspost/compress", in: []string{"internal/kafkawire"}, why: "record batches"},
	{path: "github.com/pierrec/lz4", in: []string{"internal/kafkawire"}, why: "record batches"},
	{path: "github.com/HdrHistogram/hdrhistogram-go", in: []string{"internal/lab/bench", "internal/lab/demo"}, why: "latencies of a run"},
	{path: "github.com/schollz/progressbar", in: []string{"cmd"}, why: "a download of 40 MB shows its progress"},
	{path: "golang.org/x/time", in: []string{"internal/relay/stored/purge", "internal/operate/admin", "internal/operate/httpapi", "internal/relay/tracing"}, why: "rates of the purge, of replays, of drains, of clients, of spans"},
	{path: "github.com/gofrs/flock", in: []string{"internal/lab/devstack"}, why: "one download, and one stack of test servers at a time"},

	{path: "github.com/google/go-cmp", testsOnly: true, why: "differences in tests"},
	{path: "pgregory.net/rapid", testsOnly: true, why: "properties"},
	{path: "github.com/anishathalye/porcupine", testsOnly: true, why: "is a history of the lease linearizable"},
	{path: "go.uber.org/goleak", testsOnly: true, why: "a goroutine that outlives its test"},
	{path: "github.com/Shopify/toxiproxy", testsOnly: true, why: "a network that fails"},
	{path: "github.com/twmb/franz-go", testsOnly: true, why: "a second Kafka client as a witness, and a broker that fails on demand"},
	{path: "github.com/santhosh-tekuri/jsonschema", in: []string{"pkg/codec/registry"}, why: "payloads that a JSON Schema describes, for services that want them"},
	{path: "github.com/chromedp", testsOnly: true, why: "a real browser in front of the operator's page"},
}
