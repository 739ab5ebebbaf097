package pages

// firstFile is the smallest file that delivers.
const firstFile = `mongodb: { uri: "${env:MONGODB_URI}" }
kafka:   { brokers: [kafka-1:9092, kafka-2:9092] }
watch:   [shop.outbox]
topics:
  allow: ["outbox.event.*"] # an envelope that names another topic becomes a dead letter
  create: {}                # create missing topics with the brokers' defaults; without this line their events wait for you to create them
`

const configurationIntro = `# Configuration

The smallest file that delivers:

` + "```yaml\n" + firstFile + "```" + `

## Set these first

| | key | decide |
|---|---|---|
| 1 | ` + "`mongodb.uri`" + ` | The replica set of your outbox, with a user of its own: ` + "`outrelay roles`" + ` prints the privileges that it needs. |
| 2 | ` + "`watch`" + ` | The outboxes. ` + "`outbox.New(db)`" + ` of a service writes to the collection ` + "`outbox`" + ` of its database. |
| 3 | ` + "`kafka.brokers`, `kafka.tls`, `kafka.sasl`" + ` | The cluster, and the login to it. |
| 4 | ` + "`topics.allow`" + ` | The topics that may be written. Set it before services can write names of topics into envelopes. |
| 5 | ` + "`topics.create`" + ` | Whether outrelay creates missing topics, or their events wait until you do. |
| 6 | ` + "`retention`" + ` | How long delivered events stay in the outbox. Replays and the repair of lost history need them there. |
| 7 | ` + "`http.listen`" + ` | Probes and metrics. The default is reachable from this machine only: a container needs ` + "`0.0.0.0:9464`" + `. |
| 8 | ` + "`http.admin`" + ` | The operator's page and API. Without it, only the commands can requeue a dead letter. |

Leave the other keys at their defaults until a figure gives you a reason.

## How keys are written

Each key can be set in the file, in the environment (` + "`lease.ttl` is `OUTRELAY_LEASE_TTL`" + `) or by a flag (` + "`--set lease.ttl=2s`" + `); the later of these wins. An unknown key is an error that suggests the nearest key. Write secrets as ` + "`${env:NAME}` or `${file:/path}`" + `: outrelay never prints them. A duration is a number with a unit, such as ` + "`250ms`, `90m` or `7d`" + `; a size such as ` + "`900KiB`" + `. A list can also be a comma-separated string.

The column *reload* states when a change applies:

- ` + "`restart`" + `: at the next start. After SIGHUP, the log names the keys that wait for it.
- ` + "`SIGHUP`" + `: at once after SIGHUP (` + "`systemctl reload outrelay`" + `).
- ` + "`file`" + `: the content of the file that the key names applies to the next connection, without a signal. The name of another file needs a restart.

` + "`outrelay validate`" + ` reports all problems at once and connects to nothing. [outrelay.example.yaml](../outrelay.example.yaml) has the same keys as a file, and with [outrelay.schema.json](../outrelay.schema.json) an editor completes and checks them.
`

// sectionExamples holds an example for each section. The empty name is that of the keys without a section.
var sectionExamples = map[string]string{
	"": `watcher: orders                 # three processes with this name share one job
watch: ["tenant_*.outbox"]      # one outbox per tenant
recording: mark                 # the envelope shows where its record is
retention: 7d
`,
	"dead_letters": `dead_letters: { expire: 90d, handlers: [inbox_dead, billing_dead] }
`,
	"consumers": `consumers: { databases: [shipping, billing] }
`,
	"http": `http:
  listen: 0.0.0.0:9464          # probes and metrics, in a container
  admin:
    listen: 127.0.0.1:9465
    token: "${env:ADMIN_TOKEN}"
    redact: { headers: [authorization], paths: ["$.card.number", "$..password"] }
`,
	"kafka": `kafka:
  brokers: [kafka-1:9093, kafka-2:9093]
  tls: {}                       # with the certificate authorities of the system
  sasl: { mechanism: scram-sha-512, username: outrelay, password: "${env:KAFKA_PASSWORD}" }
  compression: zstd
`,
	"lease": `lease: { ttl: 15s, renew: 3s }  # an owner that died is replaced later, and an election interrupts nothing
`,
	"limits": `limits: { memory: 128MiB }      # longer stalls of a topic, or larger events
`,
	"log": `log: { level: warn, format: json }
`,
	"mapping": `mapping: { aggregatetype: kind, aggregateid: order_id, type: name, payload: body }
`,
	"mongodb": `mongodb:
  uri: "${env:MONGODB_URI}"
  read_preference: secondaryPreferred
  indexes: false                # an administrator runs outrelay setup
`,
	"otel": `otel: { endpoint: "https://collector:4318", token: "${env:COLLECTOR_TOKEN}", sample_percent: 10 }
`,
	"purge": `purge: { rate: 20000, batch: 1000 } # services append more than 5,000 events per second
`,
	"record": `record:
  preset: cloudevents
  source: https://shop.example/orders
  headers: { tenant: "{database}" }
`,
	"retry": `retry: { max_attempts: 20, cap: 1m } # a rejected event waits for at most 12 minutes, then it is a dead letter
`,
	"state": `state: { database: shop, prefix: outrelay_ } # the only database that the user has
`,
	"topics": `topics:
  template: "{database}.{aggregatetype}"
  allow: ["tenant_*.*", orders, audit]
  create: { partitions: 6, replication: 3, configs: { retention.ms: 604800000 } }
  rules:
    - { match: { type: "Order*" }, to: [orders, audit] }
    - { match: { headers: { env: test } }, drop: true }
`,
}
