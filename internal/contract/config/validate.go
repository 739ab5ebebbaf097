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
func databaseInURI(uri URI) string {
	clean, _ := uri.withoutLogin()
	_, rest, _ := strings.Cut(clean, "://")
	rest, _, _ = strings.Cut(rest, "?")
	_, database, _ := strings.Cut(rest, "/")
	return database
}

var (
	namePattern      = regexp.MustCompile("^" + nameForm + "$")
	prefixPattern    = regexp.MustCompile("^" + prefixForm + "$")
	databasePattern  = regexp.MustCompile("^" + databaseForm + "$")
	namespacePattern = regexp.MustCompile("^" + namespaceForm + "$")
)

// validate adds a problem for each invalid value. A value that could not be decoded has a problem
// already and is not checked.
func (c *Config) validate(problems *Problems) { c.validateAll(validator{problems, nil}) }

func (c *Config) validateAll(validator validator) {
	validator.checkWords(reflect.ValueOf(c).Elem(), "")
	expectedName := forms["name"].expected
	validator.check("watcher", namePattern.MatchString(c.Watcher), strconv.Quote(c.Watcher), expectedName)
	validator.check("node", namePattern.MatchString(c.Node), strconv.Quote(c.Node), expectedName)

	c.validateTasks(validator)
	validator.checkNumber("slots", c.Slots, 1, slot.MaxSlots)
	c.validateMongo(validator)
	c.validateKafka(validator)
	c.validateRecords(validator)
	c.validateTimes(validator)
	c.validateLimits(validator)
	c.validateHTTP(validator)
	c.validateOTel(validator)
	c.validatePurge(validator)
}

type validator struct {
	*Problems
	ranges map[string]Range // collects the ranges by the path of their key, if it is not nil
}

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

		hint := newWordForm(f.enum).expected
		if successor, moved := movedWords[prefix+f.name+"="+value.String()]; moved {
			hint = successor + " replaces it"
		} else if near := NearestName(value.String(), f.enum); near != "" {
			hint += " (did you mean " + near + "?)"
		}
		v.require(prefix+f.name, value.String() == "", hint)
		v.rejectValue(prefix+f.name, strconv.Quote(value.String()), hint)
	}
}

// check adds a problem unless ok is true. It adds none if path, or a key above or below it, has a
// problem already.
func (v validator) check(path string, ok bool, found, allowed string) {
	if !ok {
		v.rejectValue(path, found, allowed)
	}
}

// rejectValue adds a problem of the value at path, unless it has one.
func (v validator) rejectValue(path, found, allowed string) {
	if !v.hasProblem(path) {
		v.report(path, "found "+found, allowed)
	}
}

// require adds a problem with a fix if a required value is missing.
func (v validator) require(path string, missing bool, fix string) {
	if missing && !v.fileLost && !v.hasProblem(path) {
		v.report(path, "required and not set", fix+" (or "+EnvName(path)+")")
	}
}

func (c *Config) validateMongo(validator validator) {
	mongoConfig := &c.MongoDB
	validator.require("mongodb.uri", mongoConfig.URI.IsZero(), "set the connection string, such as mongodb://host:27017/?replicaSet=rs0")
	if !mongoConfig.URI.IsZero() && !validator.hasProblem("mongodb.uri") {
		parsed, found, allowed := parseURI(mongoConfig.URI)
		if found != "" {
			validator.report("mongodb.uri", found, allowed)
		}
		if parsed != nil {
			validator.checkURIFiles(parsed)
		}
		product := findOtherProduct(mongoConfig.URI)
		validator.check("mongodb.uri", product == "", product, "expected MongoDB 6.0 or later: the relay needs change streams with startAfter, "+
			"transactions and the oplog, which "+product+" does not have")
	}
	validator.check("state.database", databasePattern.MatchString(c.State.Database), strconv.Quote(c.State.Database),
		forms["database"].expected)
	validator.check("state.prefix", prefixPattern.MatchString(c.State.Prefix), strconv.Quote(c.State.Prefix),
		forms["prefix"].expected)
	validator.checkTLS("mongodb.tls", mongoConfig.TLS)

	for i, ns := range c.Watch {
		path := fmt.Sprintf("watch[%d]", i)
		validator.check(path, namespacePattern.MatchString(ns), strconv.Quote(ns), forms["namespace"].expected)

		database, collection, _ := strings.Cut(ns, ".")
		validator.check(path, database != c.State.Database || !strings.HasPrefix(collection, c.State.Prefix), strconv.Quote(ns),
			"collections that begin with state.prefix hold outrelay's own documents and cannot be watched")
		validator.check(path, !isOwn(database, collection), strconv.Quote(ns),
			"this name belongs to the server or to outrelay: name the collection in which a service appends its events")
		validator.check(path, !slices.Contains(c.Watch[:i], ns), strconv.Quote(ns), "it is in the list twice")
	}

	for i, name := range c.Consumers.Databases {
		validator.check(fmt.Sprintf("consumers.databases[%d]", i), databasePattern.MatchString(name), strconv.Quote(name),
			forms["database"].expected)
	}
}

// checkURIFiles checks the files of certificates that a connection string names. The driver reads them when it connects.
func (v validator) checkURIFiles(parsed *connstring.ConnString) {
	files := TLS{
		CA:   parsed.SSLCaFile,
		Cert: cmp.Or(parsed.SSLClientCertificateKeyFile, parsed.SSLCertificateFile),
		Key:  cmp.Or(parsed.SSLClientCertificateKeyFile, parsed.SSLPrivateKeyFile),
	}
	// A key with a password cannot be read alone.
	if parsed.SSLClientCertificateKeyPasswordSet {
		files.Cert, files.Key = "", ""
	}
	for _, problem := range files.findProblems() {
		problem.Path = "mongodb.uri"
		v.reportFile(problem)
	}
}

// parseURI parses a connection string, or returns its problem without the login. It resolves no name and connects to nothing, so the
// result is nil for a mongodb+srv:// URI too, which the driver parses with a DNS query.
func parseURI(uri URI) (parsed *connstring.ConnString, found, allowed string) {
	clean, hadLogin := uri.withoutLogin()
	if !strings.HasPrefix(clean, "mongodb://") && !strings.HasPrefix(clean, "mongodb+srv://") {
		return nil, "found a text that is not a connection string", forms["mongodb"].expected
	}

	// No part of such a login is safe to show: the driver takes the end of a password for a host.
	if uri.hasUnencodedLogin() {
		return nil, "found a character in the user name or password that is not percent-encoded",
			"percent-encode each of : / ? # [ ] @ % there, such as @ as %40 and / as %2F"
	}

	if strings.HasPrefix(clean, "mongodb+srv://") {
		return nil, "", ""
	}
	parsed, err := connstring.ParseAndValidate(uri.Reveal())
	if err == nil {
		return parsed, "", ""
	}

	// The error of the driver is safe to show only for the address without its login and without secret
	// options.
	found = "found " + uri.String()
	_, err = connstring.ParseAndValidate(clean)
	switch {
	case err != nil && secretOption.MatchString(clean):
		return nil, found, "the driver cannot parse it; check the hosts and options"
	case err != nil:
		return nil, found, strings.TrimPrefix(err.Error(), "error parsing uri: ")
	case hadLogin:
		return nil, found, "invalid user name or password: use only options that fit the login"
	}
	return nil, found, "the driver cannot parse it"
}

func (c *Config) validateKafka(validator validator) {
	kafka := &c.Kafka
	validator.require("kafka.brokers", len(kafka.Brokers) == 0, "set at least one host:port")
	for i, b := range kafka.Brokers {
		valid := isHostPort(b) && !strings.Contains(b, "@") && !strings.HasPrefix(b, ":")
		validator.check(fmt.Sprintf("kafka.brokers[%d]", i), valid, quoteBroker(b), forms["broker"].expected)
	}

	validator.checkTLS("kafka.tls", kafka.TLS)
	kafka.SASL.validate(validator)

	validator.checkDuration("kafka.request_timeout", kafka.RequestTimeout, time.Second, 5*time.Minute)
	validator.checkDuration("kafka.transaction_timeout", kafka.TransactionTimeout, time.Second, time.Hour)
	validator.checkNumber("kafka.requests_per_broker", kafka.RequestsPerBroker, 1, 16)
	validator.checkSize("kafka.read_back.bytes", kafka.ReadBack.Bytes, MiB, 1<<50)
	validator.checkDuration("kafka.read_back.time", kafka.ReadBack.Time, time.Second, 24*time.Hour)
}

// validate checks that the login has the fields that its mechanism uses, and no other ones.
func (s *SASL) validate(validator validator) {
	if s == nil {
		return
	}
	mechanism, _ := sasl.Find(s.Mechanism)
	byToken, byAWS := mechanism.Credential == sasl.Token, mechanism.Credential == sasl.AWS
	unused := "mechanism " + s.Mechanism + " does not use it: remove it"
	// A field that its mechanism ignores is usually a sign of the wrong mechanism.
	if byToken || byAWS {
		validator.check("kafka.sasl.username", s.Username == "", s.Username, unused)
		validator.check("kafka.sasl.password", s.Password.IsZero(), "***", unused)
	} else {
		validator.require("kafka.sasl.username", s.Username == "", "set the user name")
		validator.require("kafka.sasl.password", s.Password.IsZero(), "set the password, best as ${file:/path} or ${env:NAME}")
	}

	if byAWS {
		validator.require("kafka.sasl.region", s.Region == "", "set the AWS region of the cluster, such as eu-west-1")
	} else {
		validator.check("kafka.sasl.region", s.Region == "", s.Region, unused)
	}

	if !byToken {
		validator.check("kafka.sasl.token", s.Token == nil, "present", unused)
		return
	}
	validator.require("kafka.sasl.token", s.Token == nil, "set its file, command or oidc")
	if s.Token != nil {
		s.Token.validate(validator)
	}
}

func (t *Token) validate(validator validator) {
	sources := 0
	for _, present := range []bool{t.File != "", len(t.Command) > 0, t.OIDC != nil} {
		if present {
			sources++
		}
	}
	validator.check("kafka.sasl.token", sources == 1, fmt.Sprintf("%d sources", sources), "set exactly one of file, command and oidc")
	for name, value := range t.Extensions {
		valid := name != "auth" && isExtensionName(name) && !strings.ContainsFunc(value, func(char rune) bool { return char < ' ' || char > '~' })
		validator.check("kafka.sasl.token.extensions", valid, name, "expected a name of letters other than auth, and a value of printable ASCII")
	}

	if oidc := t.OIDC; oidc != nil {
		address, err := url.Parse(oidc.URL)
		validator.check("kafka.sasl.token.oidc.url", err == nil && address.Host != "" && (address.Scheme == "https" || address.Scheme == "http"), oidc.URL,
			"expected the https:// address of the token endpoint")
		validator.require("kafka.sasl.token.oidc.client_id", oidc.ClientID == "", "set the id of the client")
		validator.require("kafka.sasl.token.oidc.client_secret", oidc.ClientSecret.IsZero(), "set the secret, best as ${file:/path} or ${env:NAME}")
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
func quoteBroker(broker string) string {
	if strings.Contains(broker, "@") {
		return "an address with an @"
	}
	return strconv.Quote(broker)
}

func (c *Config) validateRecords(validator validator) {
	_, problems := envelope.NewMapping(c.fieldNames())
	for _, p := range problems {
		validator.rejectValue("mapping."+p.Key, strconv.Quote(p.Found), p.Reason)
	}
	// The default template is not in the file, so its problem would have no line.
	if mapping := c.DocumentMapping(); !mapping.Has("aggregatetype") && c.Topics.Template == routing.DefaultTemplate {
		validator.rejectValue("mapping.aggregatetype", strconv.Quote(c.Mapping.AggregateType),
			"topics.template uses {aggregatetype} by default; set a template such as {database}.{collection}")
	}
	validator.checkRouting("topics.", func() error { _, err := routing.New(c.Routing()); return err })
	validator.checkRouting("record.", func() error { _, err := routing.NewPreset(c.Preset()); return err })
	validator.checkNumber("topics.max", c.Topics.Max, 1, 100_000)

	if create := c.Topics.Create; create != nil {
		checkCount := func(path string, n, high int) {
			validator.check(path, n >= 0 && n <= high, strconv.Itoa(n), "expected a number from 1, or 0 for the brokers' default")
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
		v.rejectValue(prefix+problem.Field, strconv.Quote(problem.Found), problem.Reason)
	}
}

func (c *Config) validateTimes(validator validator) {
	validator.checkDuration("lease.ttl", c.Lease.TTL, time.Second, 5*time.Minute)
	validator.checkDuration("lease.renew", c.Lease.Renew, 50*time.Millisecond, time.Minute)
	if !validator.hasProblem("lease") {
		validator.check("lease.renew", 3*c.Lease.Renew <= c.Lease.TTL, c.Lease.Renew.String(),
			"expected at most a third of lease.ttl, "+c.Lease.TTL.String())
	}

	validator.checkDuration("lease.checkpoint", c.Lease.Checkpoint, 10*time.Millisecond, time.Minute)
	validator.checkDuration("lease.drain", c.Lease.Drain, 0, 10*time.Minute)

	validator.checkNumber("retry.max_attempts", c.Retry.MaxAttempts, 1, 1_000_000)
	validator.checkDuration("retry.base", c.Retry.Base, time.Millisecond, time.Hour)
	validator.checkDuration("retry.cap", c.Retry.Cap, time.Millisecond, 7*24*time.Hour)
	if !validator.hasProblem("retry") {
		validator.check("retry.cap", c.Retry.Cap >= c.Retry.Base, c.Retry.Cap.String(),
			"expected at least retry.base, "+c.Retry.Base.String())
	}
}

// minRetention is the minimum time that a delivered envelope or a dead letter is kept, if it is not
// kept forever.
const minRetention = time.Minute

// maxRecord is the largest limits.record.
const maxRecord = 32 * MiB

func (c *Config) validatePurge(validator validator) {
	validator.checkRetention("retention", c.Retention, "to keep envelopes forever")
	validator.checkRetention("dead_letters.expire", c.DeadLetters.Expire, "to keep dead letters forever")
	validator.checkRetention("dead_letters.archive", c.DeadLetters.Archive, "to remove discarded dead letters at once")
	validator.checkRetention("purge.ttl", c.Purge.TTL, "for none")

	// The index of purge.ttl counts from the delivery time, which only a mark contains.
	if !validator.hasProblem("recording") {
		validator.check("purge.ttl", c.Purge.TTL <= 0 || c.Recording == "mark", c.Purge.TTL.String(),
			"only recording: mark stores the delivery time; set recording: mark, or purge.ttl: 0 and use retention")
	}

	validator.checkNumber("purge.rate", c.Purge.Rate, 0, 10_000_000)
	validator.checkNumber("purge.batch", c.Purge.Batch, 10, 5000)
	validator.checkDuration("purge.interval", c.Purge.Interval, 100*time.Millisecond, 24*time.Hour)
}

func (c *Config) validateLimits(validator validator) {
	validator.checkSize("limits.memory", c.Limits.Memory, Size(max(c.Slots, 1))*MiB, 64*GiB)
	validator.checkSize("limits.record", c.Limits.Record, 64*KiB, maxRecord)
	validator.checkSize("limits.envelope", c.Limits.Envelope, KiB, min(15*MiB, c.Limits.Record))
	validator.checkNumber("limits.tickets", c.Limits.Tickets, 1000, 200_000)
}

func (c *Config) validateHTTP(validator validator) {
	listen := c.HTTP.Listen
	validator.check("http.listen", listen == "off" || isHostPort(listen), strconv.Quote(listen), "expected host:port, or off")
	validator.checkDuration("http.readiness", c.HTTP.Readiness, time.Second, time.Hour)
	c.validateAdmin(validator)
}

func (c *Config) validateOTel(validator validator) {
	otel := &c.OTel
	if !otel.Endpoint.IsZero() {
		address, err := url.Parse(otel.Endpoint.Reveal())
		valid := err == nil && (address.Scheme == "http" || address.Scheme == "https") && address.Host != ""
		validator.check("otel.endpoint", valid, otel.Endpoint.String(), forms["http"].expected)
	}
	validator.checkTLS("otel.tls", otel.TLS)
	validator.checkNumber("otel.sample_percent", otel.SamplePercent, 0, 100)
	validator.checkNumber("otel.spans_per_second", otel.SpansPerSecond, 1, 100_000)

	interval := otel.MetricsInterval
	validator.check("otel.metrics_interval", interval == 0 || interval >= time.Second && interval <= time.Hour, interval.String(),
		"expected between 1s and 1h, or 0 for none")
}

func isHostPort(address string) bool {
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	n, err := strconv.ParseUint(port, 10, 16)
	return err == nil && n <= 65535
}

// checkTLS adds the problems of the files of tlsConfig.
func (v validator) checkTLS(path string, tlsConfig *TLS) {
	if tlsConfig == nil || v.hasProblem(path) {
		return
	}
	for _, problem := range tlsConfig.findProblems() {
		problem.Path = path + "." + problem.Path
		v.reportFile(problem)
	}
}
