// Package config is the configuration of outrelay: one struct, read from a YAML file, then the
// environment, then flags. Each source overrides the previous one.
//
// Loading reports all problems at once. Each has a path, the value found and the allowed values; an
// unknown key also names the key that was probably meant. Loading reads the files that the
// configuration names and connects to nothing. Secrets are of the types [Secret] and [URI], which print
// as ***. No problem quotes a secret.
//
// The doc comments of the fields below are also the descriptions in the JSON Schema ([Schema]).
package config

import "time"

// Config is the whole configuration. The zero value is not valid: start from [Default] or [Load].
type Config struct {
	// Watcher is the name of the watcher. Processes with the same name and state database share one
	// watcher, and one of them sends at a time. A new name starts a new watcher without a position.
	// Letters, digits, dot, dash, underscore; at most 100 characters. Defaults to default.
	Watcher string `yaml:"watcher" form:"name"`
	// Slots is the number of change streams. The ordering keys of the watcher are divided among them,
	// and its processes share them. More than one is needed only if one stream is too slow. The number
	// is fixed at the first start of the watcher: to change it, run outrelay reslice and then set it
	// here. limits.memory is divided by it. Between 1 and 64. Defaults to 1.
	Slots int `yaml:"slots"`
	// Node is the name of this process in status, in the lease and in pins. It must be different for
	// each process of a watcher. Defaults to the host name and four random hexadecimal digits.
	Node string `yaml:"node"`
	// Address is shown next to the node name, so that operators find this process. outrelay does not
	// connect to it. Defaults to the host name and the port of http.listen.
	Address string `yaml:"address"`
	// Tasks are the tasks of this process. relay runs the watcher or is a standby for it. cleaner
	// purges while the process is the owner. admin serves the page and the API if http.admin is set. A
	// process without relay only serves the page and the API. A process without cleaner leaves the
	// purge to the next owner. Defaults to relay, cleaner, admin.
	Tasks   []string `yaml:"tasks" form:"task"`
	MongoDB MongoDB  `yaml:"mongodb"`
	State   State    `yaml:"state"`
	// Watch lists the outbox collections as database.collection. * matches any characters and ? matches
	// one (tenant_*.outbox). One exact name opens a change stream on the collection, several names in
	// one database open one on the database, and patterns open one on the cluster. start decides which
	// events of a collection that is named later are delivered. A collection that is removed and named
	// again repeats up to five minutes of events, marked as redelivered. Defaults to <database of
	// mongodb.uri>.outbox, or *.outbox if the URI names no database.
	Watch []string `yaml:"watch" form:"namespace"`
	// Start is where a watcher without a position begins. backlog delivers the events in the outbox and
	// continues from there. now skips them, to switch from another publisher. A time
	// (2026-11-20T08:00:00Z) delivers the events committed since then. It has no effect on a watcher
	// with a position, except for collections that watch names later. Defaults to backlog.
	Start   Start   `yaml:"start"`
	Kafka   Kafka   `yaml:"kafka"`
	Mapping Mapping `yaml:"mapping"`
	Topics  Topics  `yaml:"topics"`
	Record  Record  `yaml:"record"`
	// Recording is how deliveries are recorded. position writes nothing per event. delete removes each
	// envelope after its acknowledgement, so it cannot be replayed. mark writes the time, topic,
	// partition and offset to the envelope, which outrelay history shows; it costs one write per event,
	// in bulk. Defaults to position.
	Recording string `yaml:"recording" enum:"position,delete,mark"`
	// Retention is how long delivered envelopes stay in the outbox until they are purged. A longer time
	// keeps more envelopes for replays and for sweeps of a gap; 0 keeps them forever. The age is
	// measured from the write of the envelope to the position of the watcher, so nothing is removed
	// while the watcher is behind or stopped. With mapping, or with record.preset kafka-connector, all
	// documents stay unless this key is set. Defaults to 24h.
	Retention   time.Duration `yaml:"retention"`
	Purge       Purge         `yaml:"purge"`
	DeadLetters DeadLetters   `yaml:"dead_letters"`
	Consumers   Consumers     `yaml:"consumers"`
	Lease       Lease         `yaml:"lease"`
	Retry       Retry         `yaml:"retry"`
	// LostHistory is the reaction to a gap: the oplog no longer reaches back to the position. sweep
	// finds the undelivered envelopes in the collection and continues. halt stops until an operator
	// runs recover. Defaults to sweep.
	LostHistory string `yaml:"lost_history" enum:"sweep,halt"`
	// Invalidate is the reaction if the watched collection is dropped or renamed. resume continues with
	// the collection that now has the name. halt stops until an operator runs recover. Defaults to
	// resume.
	Invalidate string `yaml:"invalidate" enum:"resume,halt"`
	// OnDrop is the handling of the envelopes that wait when their collection or database is dropped.
	// discard removes them. keep delivers them all the same; scheduled ones go with the collection. Defaults to discard.
	OnDrop string `yaml:"on_drop" enum:"discard,keep"`
	// Expired is the handling of an envelope that is past its expiresAt. dead moves it to the dead
	// letters. drop discards and counts it. Defaults to dead.
	Expired string `yaml:"expired" enum:"dead,drop"`
	Limits  Limits `yaml:"limits"`
	HTTP    HTTP   `yaml:"http"`
	OTel    OTel   `yaml:"otel"`
	Log     Log    `yaml:"log"`
}

// MongoDB is the replica set that holds the outbox. Sharded clusters are untested.
type MongoDB struct {
	// URI is the connection string, mongodb:// or mongodb+srv://. Its user name and password are never
	// printed. A changed password applies at the next start. Required.
	URI URI `yaml:"uri" form:"mongodb"`
	// TLS enables TLS with these files. An empty object uses the certificate authorities of the system.
	// Unset leaves TLS to the URI.
	TLS *TLS `yaml:"tls"`
	// ReadPreference selects the member for the change stream. A secondary reduces the load on the
	// primary and adds its replication lag to each delivery. Reads that lead to a delivery outside of
	// the stream always use the primary. Defaults to primary.
	ReadPreference string `yaml:"read_preference" enum:"primary,primaryPreferred,secondary,secondaryPreferred,nearest"`
	// Indexes creates the indexes of the watched collections at start. Turn it off if outrelay must not
	// create indexes; doctor then prints the statements. Defaults to true.
	Indexes bool `yaml:"indexes"`
}

// State is the place of outrelay's own documents: leases, positions, waiting events, dead letters, nodes, the audit
// log. Several watchers may share it.
type State struct {
	// Database is the name of the database, on the server of mongodb.uri. It may be a database that is watched,
	// such as the application's own. Defaults to outrelay.
	Database string `yaml:"database" form:"database"`
	// Prefix is the start of the names of all collections of outrelay. Collections with this prefix in the state
	// database are never watched. Defaults to outrelay_.
	Prefix string `yaml:"prefix" form:"prefix"`
}

// Pattern returns the pattern of the collections of outrelay. They are never watched, even if the configuration
// lists them (N27).
func (s State) Pattern() string { return s.Database + "." + s.Prefix + "*" }

// TLS names the files for one side of a TLS connection.
type TLS struct {
	// CA is a file with the PEM certificates to trust. Defaults to the certificate authorities of the system.
	CA string `yaml:"ca"`
	// Cert is a file with the PEM certificate of this process. It requires key.
	Cert string `yaml:"cert"`
	// Key is a file with the PEM private key of cert.
	Key string `yaml:"key"`
	// ServerName is the name that the certificate of the server must have. Defaults to the name in the address.
	ServerName string `yaml:"server_name"`
	// Insecure accepts any certificate, so an attacker in the network can read and change the traffic.
	// Use it only for tests. Defaults to false.
	Insecure bool `yaml:"insecure"`
}

// Kafka is the cluster that receives the records.
type Kafka struct {
	// Brokers are the bootstrap addresses, host:port. The other brokers are found through them. Required.
	Brokers []string `yaml:"brokers" form:"broker"`
	// TLS enables TLS with these files. An empty object uses the certificate authorities of the system.
	// Unset connects without TLS.
	TLS *TLS `yaml:"tls"`
	// SASL is the login. Unset connects without a login.
	SASL *SASL `yaml:"sasl"`
	// Compression is the compression of record batches. zstd and lz4 save network and disk, and cost CPU on both sides.
	// none has the lowest latency. Defaults to none.
	Compression string `yaml:"compression" enum:"none,gzip,snappy,lz4,zstd"`
	// RequestTimeout limits one request to a broker. A value below the brokers' own timeout causes
	// unnecessary retries. A higher value detects a dead connection later. Defaults to 10s.
	RequestTimeout time.Duration `yaml:"request_timeout"`
	// TransactionTimeout is the longest time for which a transaction of a takeover may stay open before Kafka
	// aborts it. If transaction.max.timeout.ms of the brokers is lower, the relay halves it until they accept
	// it. Defaults to 1m.
	TransactionTimeout time.Duration `yaml:"transaction_timeout"`
	// RequestsPerBroker is the number of requests in flight to each broker, for different partitions. One is enough
	// for one change stream; more can help with distant brokers. Between 1 and 16. Defaults to 1.
	RequestsPerBroker int      `yaml:"requests_per_broker"`
	ReadBack          ReadBack `yaml:"read_back"`
}

// ReadBack limits the read-back of each topic after a takeover. If a limit is reached, a part is not read,
// and the records that may have been sent before are marked as redelivered. Of the relay's records of
// all topics, as many are kept as fit into limits.memory, at 84 bytes each.
type ReadBack struct {
	// Bytes is the maximum number of bytes to read from one topic. Defaults to 2GiB.
	Bytes Size `yaml:"bytes"`
	// Time is the maximum time to read one topic. Defaults to 60s.
	Time time.Duration `yaml:"time"`
}

// SASL is a login to Kafka.
type SASL struct {
	// Mechanism is the mechanism of the login. All except the scram ones send the password or the token as it is: use them only
	// with TLS. The one for Amazon MSK signs its token with the credentials that the AWS SDK finds. Required.
	Mechanism string `yaml:"mechanism" enum:"@sasl"`
	// Username is the name of the login. Defaults to empty; mechanisms with a password require it.
	Username string `yaml:"username"`
	// Password is the password of the login. Prefer ${file:…} or ${env:…}. A file is read again for each connection, so it may
	// be replaced at any time. Never printed. Defaults to empty; mechanisms with a password require it.
	Password Secret `yaml:"password"`
	// Token is the source of the tokens. Unset has none; the mechanism for bearer tokens requires it.
	Token *Token `yaml:"token"`
	// Region is the AWS region of the cluster, such as eu-west-1. Defaults to empty; the mechanism for Amazon MSK requires it.
	Region string `yaml:"region"`
}

// Token is the source of bearer tokens. Exactly one of file, command and oidc is required.
type Token struct {
	// File contains the token. It is read for each connection, so it may be replaced at any time. Defaults to
	// none.
	File string `yaml:"file"`
	// Command is a program and its arguments, without a shell. It prints the token within 15 seconds. It runs
	// again after 80 % of the lifetime of a JWT, and otherwise for each connection. Defaults to none.
	Command []string `yaml:"command"`
	// OIDC requests tokens from an OAuth 2.0 or OpenID Connect server. Unset requests none.
	OIDC *OIDC `yaml:"oidc"`
	// Extensions are sent with each token. Confluent Cloud needs logicalCluster and identityPoolId. Defaults
	// to none.
	Extensions map[string]string `yaml:"extensions"`
}

// OIDC requests tokens with the grant client_credentials, the next one after 80 % of the lifetime of the
// last one.
type OIDC struct {
	// URL is the address of the token endpoint. Required.
	URL string `yaml:"url" form:"http"`
	// ClientID is the client id of the relay. Required.
	ClientID string `yaml:"client_id"`
	// ClientSecret is the client secret of the relay. Prefer ${file:…} or ${env:…}. A file is read again for each request of a token, so it may be
	// replaced while the relay runs. Never printed. Required.
	ClientSecret Secret `yaml:"client_secret"`
	// Scopes are the scopes to request. Defaults to none.
	Scopes []string `yaml:"scopes"`
	// Audience is the audience to request, which some servers require. Defaults to none.
	Audience string `yaml:"audience"`
}

// Lease is the exclusive right of an owner to send. The owner renews it, stores the position with it, and releases it when it
// stops.
type Lease struct {
	// TTL is how long other nodes wait before they take over from an owner that died. An election in
	// MongoDB takes 10 to 20 s: a shorter lease expires during an election, which interrupts the work
	// but loses nothing. Between 1s and 5m. Defaults to 5s.
	TTL time.Duration `yaml:"ttl"`
	// Renew is the interval between two renewals by the owner. It must be at most a third of ttl.
	// Defaults to 1s.
	Renew time.Duration `yaml:"renew"`
	// Checkpoint is the interval between two checkpoints while events are delivered. A shorter interval
	// reduces the events that are read again after a crash; a longer one reduces writes to MongoDB.
	// Defaults to 250ms.
	Checkpoint time.Duration `yaml:"checkpoint"`
	// Drain is how long a graceful stop waits for acknowledgements before it releases the lease. The
	// next owner reads back the records without an acknowledgement. Defaults to 10s.
	Drain time.Duration `yaml:"drain"`
}

// Purge configures the removal of delivered envelopes after retention. Retention 0 turns it off.
type Purge struct {
	// Rate is the maximum number of envelopes removed per second, over all collections. A purge
	// increases the latency of deliveries, so it runs only as fast as needed to keep up. If rate is
	// below the rate at which envelopes are written, the outbox grows. 0 is no limit. Defaults to 5000.
	Rate int `yaml:"rate"`
	// Batch is the maximum number of envelopes that one statement removes. Smaller batches disturb
	// other operations less; larger ones have a lower total cost. Between 10 and 5000. Defaults to 500.
	Batch int `yaml:"batch"`
	// Interval is the time between two checks of a collection. Collections with nothing to remove are
	// checked less often. Defaults to 10s.
	Interval time.Duration `yaml:"interval"`
	// TTL makes MongoDB remove envelopes this long after their delivery, with an index. It requires
	// recording mark. It also works while no watcher runs. However, its rate is not limited, it does
	// not wait for the sweep of a gap, and the index makes a mark cost four times as much. 0 is none,
	// and removes the index. Defaults to 0.
	TTL time.Duration `yaml:"ttl"`
}

// DeadLetters configures the dead letters.
type DeadLetters struct {
	// Expire removes dead letters this long after they were stored. A change applies to later dead
	// letters. 0 keeps them until an operator decides. Defaults to 0.
	Expire time.Duration `yaml:"expire"`
	// Archive is how long discarded dead letters stay in the archive, from which they can be requeued. A
	// change applies to later discards. 0 removes them at once. Defaults to 30d.
	Archive time.Duration `yaml:"archive"`
	// Handlers names the collections with the dead letters of handlers: deadletter.WithCollection of the
	// consumers. Defaults to inbox_dead.
	Handlers []string `yaml:"handlers"`
}

// Consumers describes the services that handle events, for operators.
type Consumers struct {
	// Databases are the databases of services without an outbox of this watcher. Waiting messages, dead
	// letters, inboxes and sagas are found in them and in the databases of the outboxes. Defaults to none.
	Databases []string `yaml:"databases" form:"database"`
}

// Retry limits the attempts for an envelope whose record Kafka rejects. An outage does not use up attempts.
type Retry struct {
	// MaxAttempts is the number of attempts before an envelope becomes a dead letter. Defaults to 10.
	MaxAttempts int `yaml:"max_attempts"`
	// Base is the upper limit of the first delay; the limit doubles with each attempt. Delays are
	// random below their limit. Defaults to 200ms.
	Base time.Duration `yaml:"base"`
	// Cap is the maximum of every delay. Defaults to 5m.
	Cap time.Duration `yaml:"cap"`
}

// Limits bound memory and sizes.
type Limits struct {
	// Memory is the budget for envelopes that were read and are not yet acknowledged. At the limit,
	// reading stops until Kafka catches up. A larger budget covers longer stalls of one topic. At least
	// 1MiB. Defaults to 32MiB.
	Memory Size `yaml:"memory"`
	// Envelope is the expected maximum size of an envelope. A larger one is still sent if Kafka accepts
	// it. At most limits.record. Defaults to 900KiB.
	Envelope Size `yaml:"envelope"`
	// Record is the maximum size of a record, before compression: value, key, headers and topic together.
	// An envelope whose record would be larger becomes a dead letter of class message_too_large. JSON
	// can be many times as large as the document of which it is made. Between 64KiB and 32MiB. Defaults
	// to 8MiB.
	Record Size `yaml:"record"`
	// Tickets is how many events may be read beyond the oldest unresolved one before reading stops.
	// Between 1000 and 200000. Defaults to 200000.
	Tickets int `yaml:"tickets"`
}

// HTTP configures the HTTP servers of the process.
type HTTP struct {
	// Listen is the address of /livez, /readyz and /metrics, host:port. They need no login: use a
	// private address. If only this machine can reach the address, requests that name another host are
	// rejected, so that no web page can read them through a host name of its choice. off disables them.
	// Defaults to 127.0.0.1:9464.
	Listen string `yaml:"listen"`
	// Readiness is how long MongoDB or Kafka may be unreachable before /readyz reports not ready.
	// Defaults to 30s.
	Readiness time.Duration `yaml:"readiness"`
	// Admin serves the operator's page and API at a separate address. Unset disables them.
	Admin *Admin `yaml:"admin"`
}

// Admin configures the operator's page at / and the API below /api/v1. A client is identified by a
// token, by a client certificate or by the header of a reverse proxy. At least one of them must be
// configured, or anonymous.
type Admin struct {
	// Listen is the address of the page and the API, host:port. Each request contains a token: if other
	// machines can reach the address, use tls or a trusted proxy. off serves nothing: for a service that
	// embeds the relay and mounts the page in its own server. Defaults to 127.0.0.1:9465.
	Listen string `yaml:"listen"`
	// Prefix is the path below which a proxy serves the page and the API, such as /outrelay. The proxy may pass it
	// on or remove it. Links on the page and redirects begin with it. Defaults to none.
	Prefix string `yaml:"prefix" form:"path"`
	// Token is the bearer token of operators. In a browser, a person types it with a name of choice, which
	// the audit log has as the actor. At least 12 characters. A reload changes it. Never printed. Defaults
	// to none.
	Token Secret `yaml:"token"`
	// ViewerToken is the token of viewers, who can read but not change anything. A reload changes it.
	// Defaults to none.
	ViewerToken Secret `yaml:"viewer_token"`
	// Session is how long a login in a browser lasts. It ends earlier with a logout, and when the token
	// changes. Between 5m and 720h. Defaults to 12h.
	Session time.Duration `yaml:"session"`
	// TLS serves HTTPS. Unset serves plain HTTP.
	TLS *ServerTLS `yaml:"tls"`
	// BehindTLS means that browsers reach the page by HTTPS although this listener serves plain HTTP, because a
	// proxy ends TLS. Then browsers send the cookie of a login only by HTTPS. Defaults to false.
	BehindTLS bool `yaml:"behind_tls"`
	// Proxy trusts a reverse proxy that authenticates users. Unset trusts none.
	Proxy *Proxy `yaml:"proxy"`
	// Operators are the names from client certificates and from the proxy that are operators; * matches
	// any characters. All other identified users are viewers. Defaults to none.
	Operators []string `yaml:"operators"`
	// Anonymous is the role of clients that are not identified: none, viewer or operator. It requires
	// an address of this machine. Defaults to none.
	Anonymous string `yaml:"anonymous" enum:"none,viewer,operator"`
	// Payloads is the lowest role that may request payloads and the state of sagas: operator, viewer
	// for both roles, or none. Defaults to operator.
	Payloads string `yaml:"payloads" enum:"none,operator,viewer"`
	Redact   Redact `yaml:"redact"`
	// Rate is the number of requests per second that a client may make, with bursts of twice as many.
	// Between 1 and 10000. Defaults to 50.
	Rate int `yaml:"rate"`
	// Hosts are additional host names for a listener on an address of this machine. Such a listener
	// accepts the names of this machine and rejects all others, so that no web page can reach it
	// through a host name of its choice. Defaults to none.
	Hosts []string `yaml:"hosts"`
}

// ServerTLS names the files of a TLS server. The server reads them again when they change.
type ServerTLS struct {
	// Cert is a file with the PEM certificate of this server and the intermediate certificates. Required.
	Cert string `yaml:"cert"`
	// Key is a file with the PEM private key of cert. Required.
	Key string `yaml:"key"`
	// ClientCA is a file with PEM certificates. A client with a certificate that one of them has signed
	// is identified by its common name. Other clients need a token or the proxy. Defaults to none.
	ClientCA string `yaml:"client_ca"`
}

// Proxy is a reverse proxy that identifies users.
type Proxy struct {
	// Header is the header with the name of the user, such as X-Forwarded-User. The proxy must set or
	// remove it in each request. Required.
	Header string `yaml:"header"`
	// From lists the addresses or networks of the proxy. The header of other clients is ignored. Every process at these
	// addresses can state any user: with 127.0.0.1, all users of this machine can. Required.
	From []string `yaml:"from"`
}

// Redact lists the values that the page, the API and the commands hide from all users.
type Redact struct {
	// Headers are names of headers whose values are hidden. * and ? are allowed, and case does not
	// matter. Defaults to none.
	Headers []string `yaml:"headers"`
	// Paths select the values to hide in payloads and sagas: $.card.number, $.items[*].price, or
	// $..password for a name at any depth. If there are paths, a payload that is not JSON is hidden
	// completely. Defaults to none.
	Paths []string `yaml:"paths"`
}

// OTel configures the export of traces and metrics by OTLP over HTTP with protobuf. Without an endpoint
// there is no export.
type OTel struct {
	// Endpoint is the URL of an OTLP collector; /v1/traces and /v1/metrics are appended to its path. A
	// user name and password in it are sent as basic authentication and never printed. Empty exports
	// nothing. Defaults to empty.
	Endpoint URI `yaml:"endpoint" form:"http"`
	// Token is sent to the collector as a bearer token. Never printed. Defaults to none.
	Token Secret `yaml:"token"`
	// TLS names the files for an https endpoint. Unset uses the certificate authorities of the system.
	TLS *TLS `yaml:"tls"`
	// SamplePercent is the percentage of the traces sampled by the services whose events get a span
	// when they are sent. All processes make the same decision for a trace. 0 creates no spans. At most
	// 100. Defaults to 100.
	SamplePercent int `yaml:"sample_percent"`
	// SpansPerSecond is the maximum number of spans per second, so that traces do not slow down a busy
	// outbox. Further events get no span. Between 1 and 100000. Defaults to 1000.
	SpansPerSecond int `yaml:"spans_per_second"`
	// MetricsInterval is the interval between two exports of all metrics. 0 exports none; /metrics
	// still serves them. Defaults to 30s.
	MetricsInterval time.Duration `yaml:"metrics_interval"`
}

// Log configures the log on standard error.
type Log struct {
	// Level is the lowest level that is logged. Payloads, keys and secrets are not logged at any level.
	// Defaults to info.
	Level string `yaml:"level" enum:"debug,info,warn,error"`
	// Format is text, json, or auto: text on a terminal and JSON elsewhere. Defaults to auto.
	Format string `yaml:"format" enum:"auto,text,json"`
}
