// Package config is outrelay's configuration: one struct, read from a YAML file, then the environment, then flags, each
// overriding the one before.
//
// Loading reports every problem at once, each with its path, what was found and what is allowed; an unknown key is a
// problem and names the key that was probably meant. Nothing is connected to. Secrets live in [Secret] and [URI], which
// print as *** wherever they are printed; no problem ever quotes one.
//
// The doc comments of the fields below are also the descriptions in the JSON Schema ([Schema]).
package config

import (
	"time"

	"github.com/outrelay/outrelay/internal/routing"
	"github.com/outrelay/outrelay/resume"
)

// Config is everything outrelay can be told. The zero value is not usable: start from [Default] or [Load].
type Config struct {
	// Watcher names the lease: processes with the same name and state database are one watcher, and one of them works at a
	// time. Changing it starts a new watcher with no position. Letters, digits, dot, dash, underscore; at most 100.
	// Defaults to default.
	Watcher string `yaml:"watcher"`
	// Slots divides the watcher by ordering keys over so many change streams, which its processes share among them; needed only
	// past what one stream carries. It stays what it was at the watcher's first start: change it with outrelay reslice, and
	// here. limits.memory is divided by it. Between 1 and 64. Defaults to 1.
	Slots int `yaml:"slots"`
	// Node names this process in status, in the lease and in pins. It has to differ between processes of one watcher.
	// Defaults to the host's name and four random hexadecimal digits.
	Node string `yaml:"node"`
	// Address is where operators find this process, shown beside the node's name; it is never connected to. Defaults to the
	// host's name and the port of http.listen.
	Address string `yaml:"address"`
	// Roles are what this process does: relay runs the watcher or stands by for it; cleaner purges, while it runs it; admin
	// serves the page and the API, where http.admin is set. A process without relay serves people alone; one without cleaner
	// leaves the purge to the owner after it. Defaults to relay, cleaner, admin.
	Roles   []string `yaml:"roles"`
	MongoDB MongoDB  `yaml:"mongodb"`
	// Watch lists the outbox collections as database.collection; * stands for any run of characters, ? for one
	// (tenant_*.outbox). One exact name opens a stream on that collection, several in one database a stream on the
	// database, patterns one on the cluster. Defaults to <database of mongodb.uri>.outbox, or *.outbox where the URI names
	// no database.
	Watch []string `yaml:"watch"`
	// Start says where a watcher without a position begins: backlog delivers what the outbox holds and goes on from there,
	// now skips it (for switching from another publisher), a time (2026-11-20T08:00:00Z) takes what was committed since.
	// It has no effect once there is a position. Defaults to backlog.
	Start  Start  `yaml:"start"`
	Kafka  Kafka  `yaml:"kafka"`
	Topics Topics `yaml:"topics"`
	Record Record `yaml:"record"`
	// Recording is how a delivery is remembered: watermark writes nothing per event; delete removes each envelope once it is
	// acknowledged, so that nothing is left to replay; mark writes time, topic, partition and offset on it, which outrelay
	// history shows and which costs a write per event, in bulk. Defaults to watermark.
	Recording string `yaml:"recording" enum:"watermark,delete,mark"`
	// Retention is how long delivered envelopes stay in the outbox before they are purged. Longer keeps more to replay and
	// to sweep after lost history; 0 keeps them for ever. It counts from the time of writing to the watcher's position, so
	// that nothing is removed while the watcher is behind or away. Defaults to 24h.
	Retention   time.Duration `yaml:"retention"`
	Purge       Purge         `yaml:"purge"`
	DeadLetters DeadLetters   `yaml:"dead_letters"`
	Lease       Lease         `yaml:"lease"`
	// Checkpoint is how often the position is written while it moves. Shorter bounds what is read again after a crash;
	// longer spares MongoDB writes. Defaults to 250ms.
	Checkpoint time.Duration `yaml:"checkpoint"`
	// Drain bounds a graceful stop: how long to wait for acknowledgements of what is in flight before giving the lease up.
	// What is left is read back by the next owner. Defaults to 10s.
	Drain time.Duration `yaml:"drain"`
	Retry Retry         `yaml:"retry"`
	// LostHistory says what to do when the oplog no longer reaches back to the position: sweep finds undelivered envelopes
	// in the collection and goes on; halt stops until an operator runs recover. Defaults to sweep.
	LostHistory resume.LostHistory `yaml:"lost_history" enum:"sweep,halt"`
	// Invalidate says what to do when the watched collection was dropped or renamed: resume goes on with the collection that
	// now has the name; halt stops until an operator runs recover. Defaults to resume.
	Invalidate resume.Invalidate `yaml:"invalidate" enum:"resume,halt"`
	// Expired says what becomes of an envelope that is past its expiresAt: dead moves it to the dead letters, drop discards
	// and counts it. Defaults to dead.
	Expired string `yaml:"expired" enum:"dead,drop"`
	Limits  Limits `yaml:"limits"`
	HTTP    HTTP   `yaml:"http"`
	OTel    OTel   `yaml:"otel"`
	Log     Log    `yaml:"log"`
}

// MongoDB is the replica set or sharded cluster that holds the outbox.
type MongoDB struct {
	// URI is the connection string, mongodb:// or mongodb+srv://. Its user name and password are never printed. Required.
	URI URI `yaml:"uri"`
	// State is the database for outrelay's own documents: leases, positions, nodes, events. One state database may serve
	// many watchers. Defaults to outrelay.
	State string `yaml:"state"`
	// TLS turns on TLS with these files; an empty object takes the system's roots. Unset leaves it to the URI.
	TLS *TLS `yaml:"tls"`
	// ReadPreference is the member that the change stream reads from. A secondary spares the primary and adds its
	// replication lag to every delivery. Reads that lead to a publish outside the stream always go to the primary.
	// Defaults to primary.
	ReadPreference string `yaml:"read_preference" enum:"primary,primaryPreferred,secondary,secondaryPreferred,nearest"`
	// Indexes makes the indexes on the watched collections at start. Turn it off where outrelay may not create indexes;
	// doctor then prints the statements. Defaults to true.
	Indexes bool `yaml:"indexes"`
}

// TLS names the files of one side of a TLS connection.
type TLS struct {
	// CA is a file of PEM certificates to trust. Defaults to the system's roots.
	CA string `yaml:"ca"`
	// Cert is a file with the PEM certificate this process shows; it goes with key.
	Cert string `yaml:"cert"`
	// Key is a file with the PEM private key of cert.
	Key string `yaml:"key"`
	// ServerName is the name expected in the server's certificate. Defaults to the name that was connected to.
	ServerName string `yaml:"server_name"`
	// Insecure accepts any certificate. The connection is then open to whoever can get in between; for tests. Defaults to
	// false.
	Insecure bool `yaml:"insecure"`
}

// Kafka is the cluster that events go to.
type Kafka struct {
	// Brokers are the addresses to start from, host:port; the rest of the cluster is found through them. Required.
	Brokers []string `yaml:"brokers"`
	// TLS turns on TLS with these files; an empty object takes the system's roots. Unset connects in the clear.
	TLS *TLS `yaml:"tls"`
	// SASL logs in. Unset does not.
	SASL *SASL `yaml:"sasl"`
	// Compression of record batches. zstd and lz4 save network and disk and cost CPU on both sides; none has the lowest
	// latency. Defaults to none.
	Compression string `yaml:"compression" enum:"none,gzip,snappy,lz4,zstd"`
	// Delivery is idempotent (an idempotent, fenced producer; what a crash could repeat is read back from the topic) or
	// transactional (events and position in one Kafka transaction, some milliseconds slower; not available in this
	// version). Defaults to idempotent.
	Delivery string `yaml:"delivery" enum:"idempotent,transactional"`
	// RequestTimeout bounds one request to a broker. Below the brokers' own time-out it causes needless retries; above, a
	// dead connection is noticed later. Defaults to 10s.
	RequestTimeout time.Duration `yaml:"request_timeout"`
	// Lanes is how many requests may be in flight to each broker, for different partitions. One is enough behind one change
	// stream; more helps far brokers. Between 1 and 16. Defaults to 1.
	Lanes    int      `yaml:"lanes"`
	ReadBack ReadBack `yaml:"read_back"`
}

// ReadBack bounds, per topic, how much of it is read at a take-over to find what was sent already. Beyond a bound reading
// starts later and what follows is marked redelivered.
type ReadBack struct {
	// Bytes is the most to read of one topic. Defaults to 2GiB.
	Bytes Size `yaml:"bytes"`
	// Time is the longest to read one topic. Defaults to 60s.
	Time time.Duration `yaml:"time"`
}

// SASL is a login to Kafka.
type SASL struct {
	// Mechanism of the login. plain sends the password as it is: use it over TLS only. Required.
	Mechanism string `yaml:"mechanism" enum:"plain,scram-sha-256,scram-sha-512"`
	// Username of the login. Required.
	Username string `yaml:"username"`
	// Password of the login, best given as ${file:…} or ${env:…}. Never printed. Required.
	Password Secret `yaml:"password"`
}

// Topics says which envelope goes to which topics.
type Topics struct {
	// Template is the topic of an envelope that matches no rule and names no topic itself. {aggregatetype} and {type} stand
	// for those fields. Defaults to outbox.event.{aggregatetype}.
	Template string `yaml:"template"`
	// Rules are tried in order; the first that matches decides. Several topics in one rule get a record each, and the
	// envelope counts as delivered when all are acknowledged. Defaults to none.
	Rules []Rule `yaml:"rules"`
	// Allow lists the topics that may be written, with * and ?. It guards against envelopes that name a topic they should
	// not; Kafka's internal topics (two leading underscores) are never allowed. Empty allows all others. Defaults to empty.
	Allow []string `yaml:"allow"`
	// Max is how many different topics envelopes may name while one process owns the watcher, beside those that template
	// and rules name in full. Envelopes for further topics become dead letters: without a bound, a service could fill the
	// relay's memory with topics that do not exist. Defaults to 5000.
	Max int `yaml:"max"`
	// Create makes missing topics. Unset never creates one: its envelopes wait and status says what to do.
	Create *Create `yaml:"create"`
}

// Rule sends what it matches to one or several topics.
type Rule struct {
	Match Match `yaml:"match"`
	// To is the topic, or a list of topics; {aggregatetype} and {type} are filled in. Required.
	To []string `yaml:"to"`
}

// Match is what a rule looks at; * stands for any characters and ? for one.
type Match struct {
	// AggregateType is a pattern for the envelope's aggregatetype. Empty matches all.
	AggregateType string `yaml:"aggregatetype"`
	// Type is a pattern for the envelope's type. Empty matches all.
	Type string `yaml:"type"`
}

// Create is how missing topics are made.
type Create struct {
	// Partitions of a new topic; -1 takes the brokers' default. Defaults to -1.
	Partitions int `yaml:"partitions"`
	// Replication of a new topic; -1 takes the brokers' default. Defaults to -1.
	Replication int `yaml:"replication"`
	// Configs are topic settings such as retention.ms, by Kafka's names. Defaults to none.
	Configs map[string]string `yaml:"configs"`
}

// Record is the shape of the Kafka records.
type Record struct {
	// Preset is typed (Debezium's record and a header with the type, by which consumers choose a handler), debezium (exactly
	// as Debezium's MongoEventRouter emits), cloudevents (ce_ headers and content-type) or plain (every field of the envelope
	// as a header). Key, payload and the envelope's own headers are the same in all. Defaults to typed.
	Preset string `yaml:"preset" enum:"typed,debezium,cloudevents,plain"`
	// Structured puts the CloudEvent with its payload into the value as one JSON document; for the cloudevents preset only.
	// Defaults to false: binary mode, where the payload stays byte for byte what was appended.
	Structured bool `yaml:"structured"`
	// Source is the CloudEvents source of envelopes that name none. Defaults to /<database>/<collection>.
	Source string `yaml:"source"`
	// Headers are added to every record after the preset's and before the envelope's own. {aggregatetype}, {aggregateid},
	// {type}, {contenttype}, {schemaversion}, {source}, {subject} and {time} are filled in; a header that comes out empty is left
	// out. Defaults to none.
	Headers map[string]string `yaml:"headers"`
}

// Lease is the ownership of the watcher.
type Lease struct {
	// TTL is how long an owner that died keeps others out. An election in MongoDB takes 10 to 20 s: a shorter lease runs out
	// during one, which suspends the work without losing it. Between 1s and 5m. Defaults to 5s.
	TTL time.Duration `yaml:"ttl"`
	// Renew is how often the owner renews; at least three renewals have to fit into ttl. Defaults to 1s.
	Renew time.Duration `yaml:"renew"`
}

// Purge is how delivered envelopes are removed once retention has passed. Retention 0 turns it off.
type Purge struct {
	// Rate is the most envelopes removed in a second, over all collections. Removal costs the latency of what is published
	// meanwhile: the purge goes no faster than it must to keep up, and at most this fast. 0 is no limit. Below the rate at
	// which envelopes are written the outbox grows. Defaults to 5000.
	Rate int `yaml:"rate"`
	// Batch is the most envelopes that one statement removes. Smaller ones disturb others less; larger ones cost less in
	// all. Between 10 and 5000. Defaults to 500.
	Batch int `yaml:"batch"`
	// Interval is how often the collections are looked at; those with nothing to remove, less often. Defaults to 10s.
	Interval time.Duration `yaml:"interval"`
	// TTL has MongoDB itself remove envelopes that long after their delivery, by an index; for recording mark only. It works
	// while no watcher runs and counts from the delivery, but has no limit of its rate, does not wait while lost history is
	// swept, and the index makes a mark cost four times as much. 0 is none, and removes the index. Defaults to 0.
	TTL time.Duration `yaml:"ttl"`
}

// DeadLetters is what becomes of the envelopes that could not be delivered.
type DeadLetters struct {
	// Expire removes dead letters that long after their last failure. 0 keeps them until somebody decides. Defaults to 0.
	Expire time.Duration `yaml:"expire"`
}

// Retry is how often an envelope that fails for its own reason is tried. An outage spends no attempts.
type Retry struct {
	// MaxAttempts before an envelope goes to the dead letters. Defaults to 10.
	MaxAttempts int `yaml:"max_attempts"`
	// Base bounds the first wait; each further one doubles the bound. Waits are random below it. Defaults to 200ms.
	Base time.Duration `yaml:"base"`
	// Cap bounds every wait. Defaults to 5m.
	Cap time.Duration `yaml:"cap"`
}

// Limits bound memory and sizes.
type Limits struct {
	// Memory is the budget for envelopes that were read and not yet acknowledged. At the limit reading stops until Kafka
	// catches up; a larger budget rides out longer stalls of one topic. At least 1MiB. Defaults to 32MiB.
	Memory Size `yaml:"memory"`
	// Envelope is the largest envelope that is expected; a larger one is still sent if Kafka takes it. At most 15MiB.
	// Defaults to 900KiB.
	Envelope Size `yaml:"envelope"`
	// Tickets is how many events may be read beyond the oldest one that is not settled; there reading stops. Between 1000
	// and 200000. Defaults to 200000.
	Tickets int `yaml:"tickets"`
}

// HTTP is what outrelay serves.
type HTTP struct {
	// Listen is where /livez, /readyz and /metrics are served, host:port. They need no login: bind a private address. A
	// request that arrives on an address of this machine alone is refused if it names another host, so that no web page can
	// read it by a name of its own. off serves nothing. Defaults to 127.0.0.1:9464.
	Listen string `yaml:"listen"`
	// Readiness is how long MongoDB or Kafka may be away before /readyz says not ready. Defaults to 30s.
	Readiness time.Duration `yaml:"readiness"`
	// Admin serves the operator's page and API on a listener of its own. Unset does not.
	Admin *Admin `yaml:"admin"`
}

// Admin is the operator's listener: the page at /, the API below /api/v1. Somebody who calls is known by a token, by a client
// certificate or by what a reverse proxy says; at least one of them has to be set up, or anonymous.
type Admin struct {
	// Listen is where it is served, host:port. Beyond this machine it wants tls or a trusted proxy in front: tokens are sent
	// with each request. Defaults to 127.0.0.1:9465.
	Listen string `yaml:"listen"`
	// Token makes an operator of whoever shows it, as a bearer token, or in a browser as the password beside any user name,
	// which the events log then has as the actor. At least 12 characters. Never printed. Defaults to none.
	Token Secret `yaml:"token"`
	// ViewerToken is the same for those who may only look. Defaults to none.
	ViewerToken Secret `yaml:"viewer_token"`
	// TLS serves HTTPS. Unset serves plain HTTP.
	TLS *ServerTLS `yaml:"tls"`
	// Proxy trusts a reverse proxy that logs people in. Unset trusts none.
	Proxy *Proxy `yaml:"proxy"`
	// Operators are the names, of client certificates and from the proxy, that may act; * stands for any characters. All
	// others who are known may look. Defaults to none.
	Operators []string `yaml:"operators"`
	// Anonymous is what somebody who is not known may do: none, viewer to look, operator to act as well. Only on an address of
	// this machine. Defaults to none.
	Anonymous string `yaml:"anonymous" enum:"none,viewer,operator"`
	// Payloads is the role that may see payloads and the state of sagas, where it asks for them: operator, viewer for both, or
	// none for nobody. Defaults to operator.
	Payloads string `yaml:"payloads" enum:"none,operator,viewer"`
	Redact   Redact `yaml:"redact"`
	// Rate is how many requests a client may make in a second, with twice as many at once. Between 1 and 10000. Defaults to
	// 50.
	Rate int `yaml:"rate"`
	// Hosts are the names, beside those of this machine, by which a listener on an address of this machine may be called; it
	// refuses others, so that no web page can reach it by a name of its own. Defaults to none.
	Hosts []string `yaml:"hosts"`
}

// ServerTLS names the files of a TLS server. They are read again when they change.
type ServerTLS struct {
	// Cert is a file with the PEM certificate of this server and those between it and a root. Required.
	Cert string `yaml:"cert"`
	// Key is a file with the PEM private key of cert. Required.
	Key string `yaml:"key"`
	// ClientCA is a file of PEM certificates. A client whose certificate one of them signed is known by its common name; one
	// without is known by a token or the proxy. Defaults to none.
	ClientCA string `yaml:"client_ca"`
}

// Proxy is a reverse proxy that says who calls.
type Proxy struct {
	// Header is the header in which it names the person, such as X-Forwarded-User. It must set or remove it on each request.
	// Required.
	Header string `yaml:"header"`
	// From are the addresses or networks of the proxy; the header of anybody else is not looked at. Defaults to 127.0.0.0/8
	// and ::1/128.
	From []string `yaml:"from"`
}

// Redact is what nobody sees through the page or the API.
type Redact struct {
	// Headers are names of headers whose values are hidden; * and ? may stand in them and case does not count. Defaults to
	// none.
	Headers []string `yaml:"headers"`
	// Paths lead to what is hidden in payloads and sagas: $.card.number, $.items[*].price, $..password for the name at any
	// depth. A payload that is no JSON is hidden whole once there are paths. Defaults to none.
	Paths []string `yaml:"paths"`
}

// OTel exports traces and metrics by OTLP over HTTP with protobuf. It is off until an endpoint is given.
type OTel struct {
	// Endpoint is the URL of an OTLP collector; /v1/traces and /v1/metrics are appended to its path. A user name and password
	// in it are sent as basic authentication and never printed. Empty exports nothing. Defaults to empty.
	Endpoint URI `yaml:"endpoint"`
	// Token is sent to the collector as a bearer token. Never printed. Defaults to none.
	Token Secret `yaml:"token"`
	// TLS names the files for an https endpoint. Unset takes the system's roots.
	TLS *TLS `yaml:"tls"`
	// SamplePercent is the share, of the traces that the services sampled, whose events get a span when they are sent. Every
	// process decides the same about a trace. 0 makes no spans. Between 0 and 100. Defaults to 100.
	SamplePercent int `yaml:"sample_percent"`
	// SpansPerSecond is the most spans made in a second, so that a busy outbox does not slow down for its traces; what is
	// above gets none. Between 1 and 100000. Defaults to 1000.
	SpansPerSecond int `yaml:"spans_per_second"`
	// MetricsInterval is how often every metric is exported; 0 exports none, and they are only served at /metrics. Defaults
	// to 30s.
	MetricsInterval time.Duration `yaml:"metrics_interval"`
}

// Log is what is written to standard error.
type Log struct {
	// Level of the least important line that is written. Payloads, keys and secrets are written at none. Defaults to info.
	Level string `yaml:"level" enum:"debug,info,warn,error"`
	// Format is text, json, or auto: text on a terminal and JSON elsewhere. Defaults to auto.
	Format string `yaml:"format" enum:"auto,text,json"`
}

// Default is the configuration before anything was read: all defaults that do not depend on another field.
func Default() Config {
	return Config{
		Watcher:     "default",
		Roles:       []string{RoleRelay, RoleCleaner, RoleAdmin},
		Slots:       1,
		Start:       Start{},
		MongoDB:     MongoDB{State: "outrelay", ReadPreference: "primary", Indexes: true},
		Kafka:       Kafka{Compression: "none", Delivery: "idempotent", RequestTimeout: 10 * time.Second, Lanes: 1, ReadBack: ReadBack{Bytes: 2 * GiB, Time: time.Minute}},
		Topics:      Topics{Template: routing.DefaultTemplate, Max: routing.DefaultMax},
		Record:      Record{Preset: "typed"},
		Recording:   "watermark",
		Retention:   24 * time.Hour,
		Purge:       Purge{Rate: 5000, Batch: 500, Interval: 10 * time.Second},
		Lease:       Lease{TTL: 5 * time.Second, Renew: time.Second},
		Checkpoint:  250 * time.Millisecond,
		Drain:       10 * time.Second,
		Retry:       Retry{MaxAttempts: 10, Base: 200 * time.Millisecond, Cap: 5 * time.Minute},
		LostHistory: resume.SweepLostHistory,
		Invalidate:  resume.ResumeAfterInvalidate,
		Expired:     "dead",
		Limits:      Limits{Memory: 32 * MiB, Envelope: 900 * KiB, Tickets: 200_000},
		HTTP:        HTTP{Listen: "127.0.0.1:9464", Readiness: 30 * time.Second},
		OTel:        OTel{SamplePercent: 100, SpansPerSecond: 1000, MetricsInterval: 30 * time.Second},
		Log:         Log{Level: "info", Format: "auto"},
	}
}
