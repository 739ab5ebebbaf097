package config

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/x/mongo/driver/connstring"

	"github.com/outrelay/outrelay/internal/routing"
	"github.com/outrelay/outrelay/internal/slot"
)

// derive fills in the defaults that depend on the host or on another field.
func (c *Config) derive() {
	host, err := os.Hostname()
	if err != nil || host == "" {
		host = "outrelay"
	}
	if c.Node == "" {
		var random [2]byte
		_, _ = rand.Read(random[:]) // never returns an error
		c.Node = host + "-" + hex.EncodeToString(random[:])
	}
	if c.Address == "" {
		c.Address = host
		if _, port, err := net.SplitHostPort(c.HTTP.Listen); err == nil {
			c.Address = net.JoinHostPort(host, port)
		}
	}
	if len(c.Watch) == 0 && !c.MongoDB.URI.IsZero() {
		database := "*"
		if named := databaseOf(c.MongoDB.URI); named != "" {
			database = named
		}
		c.Watch = []string{database + ".outbox"}
	}
}

// databaseOf is the database that a connection string names, or "".
func databaseOf(u URI) string {
	clean, _ := u.withoutLogin()
	_, rest, _ := strings.Cut(clean, "://")
	rest, _, _ = strings.Cut(rest, "?")
	_, database, _ := strings.Cut(rest, "/")
	return database
}

var (
	nameShape      = regexp.MustCompile(`^[A-Za-z0-9._-]{1,100}$`)
	databaseShape  = regexp.MustCompile(`^[^/\\. "$*<>:|?\x00]{1,63}$`)
	namespaceShape = regexp.MustCompile(`^[^/\\. "$<>:|\x00]{1,63}\.[^$\x00\s]{1,200}$`)
)

// validate adds everything that is wrong with the values. What could not be read is not judged again.
func (c *Config) validate(p *Problems) {
	v := validator{p}
	v.check("watcher", nameShape.MatchString(c.Watcher), strconv.Quote(c.Watcher), "expected letters, digits, dot, dash, underscore; at most 100")
	v.check("node", nameShape.MatchString(c.Node), strconv.Quote(c.Node), "expected letters, digits, dot, dash, underscore; at most 100")
	c.validateRoles(v)
	v.number("slots", c.Slots, 1, slot.Most)
	c.validateMongo(v)
	c.validateKafka(v)
	c.validateRecords(v)
	c.validateTimes(v)
	c.validateLimits(v)
	c.validateHTTP(v)
	c.validateOTel(v)
	c.validatePurge(v)
}

type validator struct{ *Problems }

// check adds a problem unless ok, or unless path or what it depends on could not even be read.
func (v validator) check(path string, ok bool, found, allowed string) {
	if !ok && !v.has(path) {
		v.add(path, "found "+found, allowed)
	}
}

func (v validator) required(path string, missing bool, what string) {
	if missing && !v.has(path) {
		v.add(path, "required and not set", what+" (or "+EnvName(path)+")")
	}
}

func (c *Config) validateMongo(v validator) {
	m := &c.MongoDB
	v.required("mongodb.uri", m.URI.IsZero(), "give the connection string, such as mongodb://host:27017/?replicaSet=rs0")
	if !m.URI.IsZero() && !v.has("mongodb.uri") {
		if found, allowed := uriProblem(m.URI); found != "" {
			v.add("mongodb.uri", found, allowed)
		}
	}
	v.check("mongodb.state", databaseShape.MatchString(m.State), strconv.Quote(m.State), "expected the name of a database")
	v.tls("mongodb.tls", m.TLS)
	for i, ns := range c.Watch {
		path := fmt.Sprintf("watch[%d]", i)
		v.check(path, namespaceShape.MatchString(ns), strconv.Quote(ns), "expected database.collection, in which * and ? may stand")
		database, _, _ := strings.Cut(ns, ".")
		v.check(path, database != m.State, strconv.Quote(ns), "the state database holds outrelay's own documents and cannot be watched")
		for _, before := range c.Watch[:i] {
			v.check(path, before != ns, strconv.Quote(ns), "it is in the list twice")
		}
	}
}

// uriProblem says what is wrong with a connection string, without its login. Nothing is resolved or connected to.
func uriProblem(u URI) (found, allowed string) {
	clean, login := u.withoutLogin()
	if !strings.HasPrefix(clean, "mongodb://") && !strings.HasPrefix(clean, "mongodb+srv://") {
		return "found something that is not a connection string", "expected mongodb://… or mongodb+srv://…"
	}
	if strings.HasPrefix(clean, "mongodb+srv://") {
		return "", "" // parsing it asks DNS
	}
	if _, err := connstring.ParseAndValidate(u.Reveal()); err == nil {
		return "", ""
	}
	_, err := connstring.ParseAndValidate(clean)
	switch {
	case err != nil && secretOption.MatchString(clean):
		return "found " + u.String(), "the driver does not understand it; look at hosts and options"
	case err != nil:
		return "found " + u.String(), strings.TrimPrefix(err.Error(), "error parsing uri: ")
	case login:
		return "found " + u.String(), "user name or password is not accepted: characters such as : / ? # [ ] @ % in them have to be percent-encoded, and options have to fit the login"
	}
	return "found " + u.String(), "the driver does not understand it"
}

func (c *Config) validateKafka(v validator) {
	k := &c.Kafka
	v.required("kafka.brokers", len(k.Brokers) == 0, "give at least one host:port")
	for i, b := range k.Brokers {
		v.check(fmt.Sprintf("kafka.brokers[%d]", i), hostPort(b) && !strings.Contains(b, "@") && !strings.HasPrefix(b, ":"), brokerText(b), "expected host:port")
	}
	v.tls("kafka.tls", k.TLS)
	if s := k.SASL; s != nil {
		v.required("kafka.sasl.mechanism", s.Mechanism == "", "one of plain, scram-sha-256, scram-sha-512")
		v.required("kafka.sasl.username", s.Username == "", "give the user name")
		v.required("kafka.sasl.password", s.Password.IsZero(), "give the password, best as ${file:/path} or ${env:NAME}")
	}
	v.check("kafka.delivery", k.Delivery == "idempotent", k.Delivery, "only idempotent is available in this version")
	v.between("kafka.request_timeout", k.RequestTimeout, time.Second, 5*time.Minute)
	v.number("kafka.lanes", k.Lanes, 1, 16)
	v.size("kafka.read_back.bytes", k.ReadBack.Bytes, MiB, 1<<50)
	v.between("kafka.read_back.time", k.ReadBack.Time, time.Second, 24*time.Hour)
}

// brokerText shows an address unless a login could be in it.
func brokerText(b string) string {
	if strings.Contains(b, "@") {
		return "an address with an @"
	}
	return strconv.Quote(b)
}

func (c *Config) validateRecords(v validator) {
	v.routing("topics.", func() error { _, err := routing.New(c.Routing()); return err })
	v.routing("record.", func() error { _, err := routing.NewPreset(c.Preset()); return err })
	v.number("topics.max", c.Topics.Max, 1, 100_000)
	if create := c.Topics.Create; create != nil {
		v.check("topics.create.partitions", create.Partitions == -1 || create.Partitions >= 1 && create.Partitions <= 100_000, strconv.Itoa(create.Partitions), "expected a number from 1, or -1 for the brokers' default")
		v.check("topics.create.replication", create.Replication == -1 || create.Replication >= 1 && create.Replication <= 1000, strconv.Itoa(create.Replication), "expected a number from 1, or -1 for the brokers' default")
	}
}

// Routing is what the router goes by.
func (c *Config) Routing() routing.Config {
	r := routing.Config{Template: c.Topics.Template, Allow: c.Topics.Allow, Max: c.Topics.Max}
	for _, one := range c.Topics.Rules {
		r.Rules = append(r.Rules, routing.Rule{AggregateType: one.Match.AggregateType, Type: one.Match.Type, To: one.To})
	}
	return r
}

// Preset is the shape of the records.
func (c *Config) Preset() routing.PresetConfig {
	return routing.PresetConfig{Name: c.Record.Preset, Structured: c.Record.Structured, Source: c.Record.Source, Headers: c.Record.Headers}
}

// routing adds the problems that the packages themselves find, under the keys they come from.
func (v validator) routing(prefix string, check func() error) {
	var bad *routing.InvalidError
	if errors.As(check(), &bad) {
		for _, one := range bad.Problems {
			v.check(prefix+one.Field, false, strconv.Quote(one.Found), one.Reason)
		}
	}
}

func (c *Config) validateTimes(v validator) {
	v.between("lease.ttl", c.Lease.TTL, time.Second, 5*time.Minute)
	v.between("lease.renew", c.Lease.Renew, 50*time.Millisecond, time.Minute)
	if !v.has("lease") {
		v.check("lease.renew", 3*c.Lease.Renew <= c.Lease.TTL, c.Lease.Renew.String(), "expected at most a third of lease.ttl, "+c.Lease.TTL.String())
	}
	v.between("checkpoint", c.Checkpoint, 10*time.Millisecond, time.Minute)
	v.between("drain", c.Drain, 0, 10*time.Minute)
	v.number("retry.max_attempts", c.Retry.MaxAttempts, 1, 1_000_000)
	v.between("retry.base", c.Retry.Base, time.Millisecond, time.Hour)
	v.between("retry.cap", c.Retry.Cap, time.Millisecond, 7*24*time.Hour)
	if !v.has("retry") {
		v.check("retry.cap", c.Retry.Cap >= c.Retry.Base, c.Retry.Cap.String(), "expected at least retry.base, "+c.Retry.Base.String())
	}
}

// leastKept is the least that an envelope is kept once it was delivered, where that is by the clock.
const leastKept = time.Minute

func (c *Config) validatePurge(v validator) {
	v.kept("retention", c.Retention, "to keep envelopes for ever")
	v.kept("dead_letters.expire", c.DeadLetters.Expire, "to keep dead letters for ever")
	v.kept("purge.ttl", c.Purge.TTL, "for none")
	if !v.has("recording") {
		v.check("purge.ttl", c.Purge.TTL <= 0 || c.Recording == "mark", c.Purge.TTL.String(), "only recording mark writes the time that it counts from; set recording: mark, or 0 and retention")
	}
	v.number("purge.rate", c.Purge.Rate, 0, 10_000_000)
	v.number("purge.batch", c.Purge.Batch, 10, 5000)
	v.between("purge.interval", c.Purge.Interval, 100*time.Millisecond, 24*time.Hour)
}

func (v validator) kept(path string, d time.Duration, zero string) {
	v.check(path, d == 0 || d >= leastKept, d.String(), "expected at least "+leastKept.String()+", or 0 "+zero)
}

func (c *Config) validateLimits(v validator) {
	v.size("limits.memory", c.Limits.Memory, Size(max(c.Slots, 1))*MiB, 64*GiB)
	v.size("limits.envelope", c.Limits.Envelope, KiB, 15*MiB)
	v.number("limits.tickets", c.Limits.Tickets, 1000, 200_000)
}

func (c *Config) validateHTTP(v validator) {
	v.check("http.listen", c.HTTP.Listen == "off" || hostPort(c.HTTP.Listen), strconv.Quote(c.HTTP.Listen), "expected host:port, or off")
	v.between("http.readiness", c.HTTP.Readiness, time.Second, time.Hour)
	c.validateAdmin(v)
}

func (c *Config) validateOTel(v validator) {
	if e := c.OTel.Endpoint; !e.IsZero() {
		u, err := url.Parse(e.Reveal())
		v.check("otel.endpoint", err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Host != "", e.String(), "expected http://… or https://…")
	}
	v.tls("otel.tls", c.OTel.TLS)
	v.number("otel.sample_percent", c.OTel.SamplePercent, 0, 100)
	v.number("otel.spans_per_second", c.OTel.SpansPerSecond, 1, 100_000)
	v.check("otel.metrics_interval", c.OTel.MetricsInterval == 0 || c.OTel.MetricsInterval >= time.Second && c.OTel.MetricsInterval <= time.Hour,
		c.OTel.MetricsInterval.String(), "expected between 1s and 1h, or 0 for none")
}

func hostPort(s string) bool {
	_, port, err := net.SplitHostPort(s)
	if err != nil {
		return false
	}
	n, err := strconv.ParseUint(port, 10, 16)
	return err == nil && n <= 65535
}

func (v validator) between(path string, d, low, high time.Duration) {
	v.check(path, d >= low && d <= high, d.String(), "expected between "+low.String()+" and "+high.String())
}

func (v validator) size(path string, s, low, high Size) {
	v.check(path, s >= low && s <= high, s.String(), "expected between "+low.String()+" and "+high.String())
}

func (v validator) number(path string, n, low, high int) {
	v.check(path, n >= low && n <= high, strconv.Itoa(n), fmt.Sprintf("expected between %d and %d", low, high))
}

func (v validator) tls(path string, t *TLS) {
	if t == nil || v.has(path) {
		return
	}
	for _, one := range t.problems() {
		v.add(path+"."+one.Path, one.Found, one.Allowed)
	}
}

// warnings are what is accepted and has no effect.
func (c *Config) warnings() (w []string) {
	w = append(w, c.HTTP.Admin.warnings()...)
	if u := c.OTel.Endpoint; strings.HasPrefix(u.Reveal(), "http://") && (!c.OTel.Token.IsZero() || strings.Contains(u.Reveal(), "@")) {
		w = append(w, "otel.endpoint is http with a token or a login: they cross the network in the clear")
	}
	for _, one := range []struct {
		path string
		tls  *TLS
	}{{"mongodb.tls", c.MongoDB.TLS}, {"kafka.tls", c.Kafka.TLS}} {
		if one.tls == nil {
			continue
		}
		if one.tls.Insecure {
			w = append(w, one.path+".insecure accepts any certificate: whoever gets in between reads and changes what passes")
		}
		w = append(w, readableByAll(one.path+".key", one.tls.Key)...)
	}
	if a := c.HTTP.Admin; a != nil && a.TLS != nil {
		w = append(w, readableByAll("http.admin.tls.key", a.TLS.Key)...)
	}
	if uri := strings.ToLower(c.MongoDB.URI.Reveal()); strings.Contains(uri, "tlsinsecure=true") || strings.Contains(uri, "tlsallowinvalid") {
		w = append(w, "mongodb.uri accepts any certificate: whoever gets in between reads and changes what passes")
	}
	if c.Kafka.SASL != nil && c.Kafka.SASL.Mechanism == "plain" && c.Kafka.TLS == nil {
		w = append(w, "kafka.sasl.mechanism is plain without kafka.tls: the password crosses the network in the clear")
	}
	return w
}

// readableByAll warns of a private key that every user of this machine may read.
func readableByAll(path, file string) []string {
	info, err := os.Stat(file)
	if file == "" || err != nil || info.Mode().Perm()&0o004 == 0 {
		return nil
	}
	return []string{fmt.Sprintf("%s: every user of this machine may read %s; take that right away with chmod o-r", path, file)}
}
