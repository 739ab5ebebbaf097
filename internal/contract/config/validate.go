package config

import (
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/x/mongo/driver/connstring"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/contract/sasl"
	"github.com/outrelay/outrelay/internal/contract/slot"
)

// setDerivedDefaults sets the defaults that depend on the host or on another field.
func (c *Config) setDerivedDefaults() {
	host, err := os.Hostname()
	if err != nil || host == "" {
		host = "outrelay"
	}

	if c.Node == "" {
		// Two processes on one host need different names.
		var random [2]byte
		_, _ = rand.Read(random[:]) // never returns an error
		c.Node = host + "-" + hex.EncodeToString(random[:])
	}
	c.Topics.Template = cmp.Or(c.Topics.Template, routing.TemplateOf(c.Record.Preset))
	if c.Topics.Max == 0 {
		c.Topics.Max = routing.DefaultMax
		// A created topic stays in Kafka, with all its partitions.
		if c.Topics.Create != nil {
			c.Topics.Max = routing.DefaultMaxCreated
		}
	}
	// Other nodes show the address, so it names the host and not the wildcard of the listener.
	if c.Address == "" {
		c.Address = host
		if _, port, err := net.SplitHostPort(c.HTTP.Listen); err == nil {
			c.Address = net.JoinHostPort(host, port)
		}
	}

	// Without a database in the address, outboxes of all databases are watched.
	if len(c.Watch) == 0 && !c.MongoDB.URI.IsZero() {
		database := databaseInURI(c.MongoDB.URI)
		if database == "" {
			database = "*"
		}
		c.Watch = []string{database + ".outbox"}
	}
}

// databaseInURI returns the database in a connection string, or "".
func databaseInURI(u URI) string {
	clean, _ := u.withoutLogin()
	_, rest, _ := strings.Cut(clean, "://")
	rest, _, _ = strings.Cut(rest, "?")
	_, database, _ := strings.Cut(rest, "/")
	return database
}

var (
	namePattern      = regexp.MustCompile(`^[A-Za-z0-9._-]{1,100}$`)
	prefixPattern    = regexp.MustCompile(`^[A-Za-z0-9_-]{1,60}$`)
	databasePattern  = regexp.MustCompile(`^[^/\\. "$*<>:|?\x00]{1,63}$`)
	namespacePattern = regexp.MustCompile(`^[^/\\. "$<>:|\x00]{1,63}\.[^$\x00\s]{1,200}$`)
)

// validate adds a problem for each invalid value. A value that could not be decoded has a problem
// already and is not checked.
func (c *Config) validate(p *Problems) {
	v := validator{p}
	v.checkWords(reflect.ValueOf(c).Elem(), "")
	const expectedName = "expected letters, digits, dot, dash, underscore; at most 100"
	v.check("watcher", namePattern.MatchString(c.Watcher), strconv.Quote(c.Watcher), expectedName)
	v.check("node", namePattern.MatchString(c.Node), strconv.Quote(c.Node), expectedName)

	c.validateRoles(v)
	v.checkNumber("slots", c.Slots, 1, slot.MaxSlots)
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

// checkWords checks the keys below section that have a list of allowed words.
func (v validator) checkWords(section reflect.Value, prefix string) {
	for _, f := range fieldsOf(section.Type()) {
		value := section.Field(f.index)
		if _, ok := sectionType(f.typ); ok {
			if value = reflect.Indirect(value); value.IsValid() {
				v.checkWords(value, prefix+f.name+".")
			}
			continue
		}
		if f.enum == nil || slices.Contains(f.enum, value.String()) {
			continue
		}

		hint := "expected one of " + strings.Join(f.enum, ", ")
		if near := NearestName(value.String(), f.enum); near != "" {
			hint += " (did you mean " + near + "?)"
		}
		v.require(prefix+f.name, value.String() == "", hint)
		v.check(prefix+f.name, false, strconv.Quote(value.String()), hint)
	}
}

// check adds a problem unless ok is true. It adds none if path, or a key above or below it, has a
// problem already.
func (v validator) check(path string, ok bool, found, allowed string) {
	if !ok && !v.hasProblem(path) {
		v.report(path, "found "+found, allowed)
	}
}

// require adds a problem with a fix if a required value is missing.
func (v validator) require(path string, missing bool, fix string) {
	if missing && !v.fileLost && !v.hasProblem(path) {
		v.report(path, "required and not set", fix+" (or "+EnvName(path)+")")
	}
}

func (c *Config) validateMongo(v validator) {
	m := &c.MongoDB
	v.require("mongodb.uri", m.URI.IsZero(), "set the connection string, such as mongodb://host:27017/?replicaSet=rs0")
	if !m.URI.IsZero() && !v.hasProblem("mongodb.uri") {
		if found, allowed := findURIProblem(m.URI); found != "" {
			v.report("mongodb.uri", found, allowed)
		}
		product := findOtherProduct(m.URI)
		v.check("mongodb.uri", product == "", product, "expected MongoDB 6.0 or later: the relay needs change streams with startAfter, "+
			"transactions and the oplog, which "+product+" does not have")
	}
	v.check("state.database", databasePattern.MatchString(c.State.Database), strconv.Quote(c.State.Database),
		"expected the name of a database")
	v.check("state.prefix", prefixPattern.MatchString(c.State.Prefix), strconv.Quote(c.State.Prefix),
		"expected 1 to 60 letters, digits, _ or -, such as outrelay_")
	v.checkTLS("mongodb.tls", m.TLS)

	for i, ns := range c.Watch {
		path := fmt.Sprintf("watch[%d]", i)
		v.check(path, namespacePattern.MatchString(ns), strconv.Quote(ns), "expected database.collection; * and ? are allowed")

		database, collection, _ := strings.Cut(ns, ".")
		v.check(path, database != c.State.Database || !strings.HasPrefix(collection, c.State.Prefix), strconv.Quote(ns),
			"collections that begin with state.prefix hold outrelay's own documents and cannot be watched")
		v.check(path, !slices.Contains(c.Watch[:i], ns), strconv.Quote(ns), "it is in the list twice")
	}
}

// findURIProblem checks a connection string without its login. It resolves no name and connects to nothing.
func findURIProblem(u URI) (found, allowed string) {
	clean, hadLogin := u.withoutLogin()
	if !strings.HasPrefix(clean, "mongodb://") && !strings.HasPrefix(clean, "mongodb+srv://") {
		return "found a text that is not a connection string", "expected mongodb://… or mongodb+srv://…"
	}

	// The driver sends a DNS query to parse a mongodb+srv:// URI.

	if strings.HasPrefix(clean, "mongodb+srv://") {
		return "", ""
	}
	if _, err := connstring.ParseAndValidate(u.Reveal()); err == nil {
		return "", ""
	}

	// The error of the driver is safe to show only for the address without its login and without secret
	// options.
	found = "found " + u.String()
	_, err := connstring.ParseAndValidate(clean)
	switch {
	case err != nil && secretOption.MatchString(clean):
		return found, "the driver cannot parse it; check the hosts and options"
	case err != nil:
		return found, strings.TrimPrefix(err.Error(), "error parsing uri: ")
	case hadLogin:
		return found, "invalid user name or password: percent-encode characters such as : / ? # [ ] @ %, " +
			"and use only options that fit the login"
	}
	return found, "the driver cannot parse it"
}

func (c *Config) validateKafka(v validator) {
	k := &c.Kafka
	v.require("kafka.brokers", len(k.Brokers) == 0, "set at least one host:port")
	for i, b := range k.Brokers {
		valid := isHostPort(b) && !strings.Contains(b, "@") && !strings.HasPrefix(b, ":")
		v.check(fmt.Sprintf("kafka.brokers[%d]", i), valid, quoteBroker(b), "expected host:port")
	}

	v.checkTLS("kafka.tls", k.TLS)
	k.SASL.validate(v)

	v.checkDuration("kafka.request_timeout", k.RequestTimeout, time.Second, 5*time.Minute)
	v.checkDuration("kafka.transaction_timeout", k.TransactionTimeout, time.Second, time.Hour)
	v.checkNumber("kafka.requests_per_broker", k.RequestsPerBroker, 1, 16)
	v.checkSize("kafka.read_back.bytes", k.ReadBack.Bytes, MiB, 1<<50)
	v.checkDuration("kafka.read_back.time", k.ReadBack.Time, time.Second, 24*time.Hour)
}

// validate checks that the login has the fields that its mechanism uses, and no other ones.
func (s *SASL) validate(v validator) {
	if s == nil {
		return
	}
	m, _ := sasl.Find(s.Mechanism)
	byToken, byAWS := m.Credential == sasl.Token, m.Credential == sasl.AWS
	unused := "mechanism " + s.Mechanism + " does not use it: remove it"
	// A field that its mechanism ignores is usually a sign of the wrong mechanism.
	if byToken || byAWS {
		v.check("kafka.sasl.username", s.Username == "", s.Username, unused)
		v.check("kafka.sasl.password", s.Password.IsZero(), "***", unused)
	} else {
		v.require("kafka.sasl.username", s.Username == "", "set the user name")
		v.require("kafka.sasl.password", s.Password.IsZero(), "set the password, best as ${file:/path} or ${env:NAME}")
	}

	if byAWS {
		v.require("kafka.sasl.region", s.Region == "", "set the AWS region of the cluster, such as eu-west-1")
	} else {
		v.check("kafka.sasl.region", s.Region == "", s.Region, unused)
	}

	if !byToken {
		v.check("kafka.sasl.token", s.Token == nil, "present", unused)
		return
	}
	v.require("kafka.sasl.token", s.Token == nil, "set its file, command or oidc")
	if s.Token != nil {
		s.Token.validate(v)
	}
}

func (t *Token) validate(v validator) {
	sources := 0
	for _, present := range []bool{t.File != "", len(t.Command) > 0, t.OIDC != nil} {
		if present {
			sources++
		}
	}
	v.check("kafka.sasl.token", sources == 1, fmt.Sprintf("%d sources", sources), "set exactly one of file, command and oidc")
	for name, value := range t.Extensions {
		valid := name != "auth" && isExtensionName(name) && !strings.ContainsFunc(value, func(r rune) bool { return r < ' ' || r > '~' })
		v.check("kafka.sasl.token.extensions", valid, name, "expected a name of letters other than auth, and a value of printable ASCII")
	}

	if o := t.OIDC; o != nil {
		u, err := url.Parse(o.URL)
		v.check("kafka.sasl.token.oidc.url", err == nil && u.Host != "" && (u.Scheme == "https" || u.Scheme == "http"), o.URL,
			"expected the https:// address of the token endpoint")
		v.require("kafka.sasl.token.oidc.client_id", o.ClientID == "", "set the id of the client")
		v.require("kafka.sasl.token.oidc.client_secret", o.ClientSecret.IsZero(), "set the secret, best as ${file:/path} or ${env:NAME}")
	}
}

// isExtensionName reports whether name consists of letters, as RFC 7628 requires.
func isExtensionName(name string) bool {
	for _, r := range name {
		if (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') {
			return false
		}
	}
	return name != ""
}

// quoteBroker quotes an address, unless it may contain a login.
func quoteBroker(b string) string {
	if strings.Contains(b, "@") {
		return "an address with an @"
	}
	return strconv.Quote(b)
}

func (c *Config) validateRecords(v validator) {
	_, problems := envelope.NewMapping(c.fieldNames())
	for _, p := range problems {
		v.check("mapping."+p.Key, false, strconv.Quote(p.Found), p.Reason)
	}
	// The default template is not in the file, so its problem would have no line.
	if m := c.DocumentMapping(); !m.Has("aggregatetype") && c.Topics.Template == routing.DefaultTemplate {
		v.check("mapping.aggregatetype", false, strconv.Quote(c.Mapping.AggregateType),
			"topics.template uses {aggregatetype} by default; set a template such as {database}.{collection}")
	}
	v.checkRouting("topics.", func() error { _, err := routing.New(c.Routing()); return err })
	v.checkRouting("record.", func() error { _, err := routing.NewPreset(c.Preset()); return err })
	v.checkNumber("topics.max", c.Topics.Max, 1, 100_000)

	if create := c.Topics.Create; create != nil {
		checkCount := func(path string, n, high int) {
			v.check(path, n >= 0 && n <= high, strconv.Itoa(n), "expected a number from 1, or 0 for the brokers' default")
		}
		checkCount("topics.create.partitions", create.Partitions, 100_000)
		checkCount("topics.create.replication", create.Replication, 1000)
	}
}

// checkRouting adds the problems that a constructor of the package routing reports, under the keys with
// this prefix.
func (v validator) checkRouting(prefix string, construct func() error) {
	var invalid *routing.InvalidError
	if !errors.As(construct(), &invalid) {
		return
	}
	for _, problem := range invalid.Problems {
		v.check(prefix+problem.Field, false, strconv.Quote(problem.Found), problem.Reason)
	}
}

func (c *Config) validateTimes(v validator) {
	v.checkDuration("lease.ttl", c.Lease.TTL, time.Second, 5*time.Minute)
	v.checkDuration("lease.renew", c.Lease.Renew, 50*time.Millisecond, time.Minute)
	if !v.hasProblem("lease") {
		v.check("lease.renew", 3*c.Lease.Renew <= c.Lease.TTL, c.Lease.Renew.String(),
			"expected at most a third of lease.ttl, "+c.Lease.TTL.String())
	}

	v.checkDuration("lease.checkpoint", c.Lease.Checkpoint, 10*time.Millisecond, time.Minute)
	v.checkDuration("lease.drain", c.Lease.Drain, 0, 10*time.Minute)

	v.checkNumber("retry.max_attempts", c.Retry.MaxAttempts, 1, 1_000_000)
	v.checkDuration("retry.base", c.Retry.Base, time.Millisecond, time.Hour)
	v.checkDuration("retry.cap", c.Retry.Cap, time.Millisecond, 7*24*time.Hour)
	if !v.hasProblem("retry") {
		v.check("retry.cap", c.Retry.Cap >= c.Retry.Base, c.Retry.Cap.String(),
			"expected at least retry.base, "+c.Retry.Base.String())
	}
}

// minRetention is the minimum time that a delivered envelope or a dead letter is kept, if it is not
// kept forever.
const minRetention = time.Minute

func (c *Config) validatePurge(v validator) {
	v.checkRetention("retention", c.Retention, "to keep envelopes forever")
	v.checkRetention("dead_letters.expire", c.DeadLetters.Expire, "to keep dead letters forever")
	v.checkRetention("purge.ttl", c.Purge.TTL, "for none")

	// The index of purge.ttl counts from the delivery time, which only a mark contains.
	if !v.hasProblem("recording") {
		v.check("purge.ttl", c.Purge.TTL <= 0 || c.Recording == "mark", c.Purge.TTL.String(),
			"only recording: mark stores the delivery time; set recording: mark, or purge.ttl: 0 and use retention")
	}

	v.checkNumber("purge.rate", c.Purge.Rate, 0, 10_000_000)
	v.checkNumber("purge.batch", c.Purge.Batch, 10, 5000)
	v.checkDuration("purge.interval", c.Purge.Interval, 100*time.Millisecond, 24*time.Hour)
}

// checkRetention checks a time of which 0 has the meaning zero.
func (v validator) checkRetention(path string, d time.Duration, zero string) {
	v.check(path, d == 0 || d >= minRetention, d.String(), "expected at least "+minRetention.String()+", or 0 "+zero)
}

func (c *Config) validateLimits(v validator) {
	v.checkSize("limits.memory", c.Limits.Memory, Size(max(c.Slots, 1))*MiB, 64*GiB)
	v.checkSize("limits.record", c.Limits.Record, 64*KiB, 32*MiB)
	v.checkSize("limits.envelope", c.Limits.Envelope, KiB, min(15*MiB, c.Limits.Record))
	v.checkNumber("limits.tickets", c.Limits.Tickets, 1000, 200_000)
}

func (c *Config) validateHTTP(v validator) {
	listen := c.HTTP.Listen
	v.check("http.listen", listen == "off" || isHostPort(listen), strconv.Quote(listen), "expected host:port, or off")
	v.checkDuration("http.readiness", c.HTTP.Readiness, time.Second, time.Hour)
	c.validateAdmin(v)
}

func (c *Config) validateOTel(v validator) {
	o := &c.OTel
	if !o.Endpoint.IsZero() {
		u, err := url.Parse(o.Endpoint.Reveal())
		valid := err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Host != ""
		v.check("otel.endpoint", valid, o.Endpoint.String(), "expected http://… or https://…")
	}
	v.checkTLS("otel.tls", o.TLS)
	v.checkNumber("otel.sample_percent", o.SamplePercent, 0, 100)
	v.checkNumber("otel.spans_per_second", o.SpansPerSecond, 1, 100_000)

	interval := o.MetricsInterval
	v.check("otel.metrics_interval", interval == 0 || interval >= time.Second && interval <= time.Hour, interval.String(),
		"expected between 1s and 1h, or 0 for none")
}

func isHostPort(s string) bool {
	_, port, err := net.SplitHostPort(s)
	if err != nil {
		return false
	}
	n, err := strconv.ParseUint(port, 10, 16)
	return err == nil && n <= 65535
}

func (v validator) checkDuration(path string, d, low, high time.Duration) {
	v.check(path, d >= low && d <= high, d.String(), "expected between "+low.String()+" and "+high.String())
}

func (v validator) checkSize(path string, s, low, high Size) {
	v.check(path, s >= low && s <= high, s.String(), "expected between "+low.String()+" and "+high.String())
}

func (v validator) checkNumber(path string, n, low, high int) {
	v.check(path, n >= low && n <= high, strconv.Itoa(n), fmt.Sprintf("expected between %d and %d", low, high))
}

// checkTLS adds the problems of the files of t.
func (v validator) checkTLS(path string, t *TLS) {
	if t == nil || v.hasProblem(path) {
		return
	}
	for _, problem := range t.findProblems() {
		v.report(path+"."+problem.Path, problem.Found, problem.Allowed)
	}
}

// findWarnings returns warnings about settings that are valid but weaken the protection.
func (c *Config) findWarnings() (w []string) {
	w = append(w, c.HTTP.Admin.findWarnings()...)

	endpoint := c.OTel.Endpoint.Reveal()
	if strings.HasPrefix(endpoint, "http://") && (!c.OTel.Token.IsZero() || strings.Contains(endpoint, "@")) {
		w = append(w, "otel.endpoint is http with a token or a login: they are sent unencrypted")
	}

	for _, section := range []struct {
		path string
		tls  *TLS
	}{{"mongodb.tls", c.MongoDB.TLS}, {"kafka.tls", c.Kafka.TLS}} {
		if section.tls == nil {
			continue
		}
		if section.tls.Insecure {
			w = append(w, section.path+".insecure accepts any certificate: an attacker in the network can read and change the traffic")
		}
		w = append(w, warnIfReadableByAll(section.path+".key", section.tls.Key)...)
	}
	if a := c.HTTP.Admin; a != nil && a.TLS != nil {
		w = append(w, warnIfReadableByAll("http.admin.tls.key", a.TLS.Key)...)
	}

	uri := strings.ToLower(c.MongoDB.URI.Reveal())
	if strings.Contains(uri, "tlsinsecure=true") || strings.Contains(uri, "tlsallowinvalid") {
		w = append(w, "mongodb.uri accepts any certificate: an attacker in the network can read and change the traffic")
	}
	if s := c.Kafka.SASL; s != nil && c.Kafka.TLS == nil && sendsClear(s.Mechanism) {
		w = append(w, "kafka.sasl.mechanism is "+s.Mechanism+" without kafka.tls: the login is sent unencrypted")
	}
	return w
}

// sendsClear reports whether a mechanism sends its password or token as it is.
func sendsClear(mechanism string) bool {
	m, _ := sasl.Find(mechanism)
	return m.Clear
}

// warnIfReadableByAll returns a warning if every user of this machine may read the private key.
func warnIfReadableByAll(path, file string) []string {
	info, err := os.Stat(file)
	if file == "" || err != nil || info.Mode().Perm()&0o004 == 0 {
		return nil
	}
	return []string{fmt.Sprintf("%s: every user of this machine may read %s; to prevent this, run chmod o-r", path, file)}
}
