//go:build unix

package integration

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/test/kit"
)

const (
	exitRejected  = 1
	exitTemporary = 75
)

// securedServers are a replica set with access control and TLS, and a broker with a listener of each kind. The listener
// with SASL and TLS offers SCRAM-SHA-512 only.
type securedServers struct {
	stack *devstack.Stack
	ca    string // file
}

func startSecuredServers(t *testing.T) securedServers {
	t.Helper()
	stack := stacktest.Own(t, devstack.Options{
		Mongods: 1, Brokers: 1, Quick: true,
		Mongo: devstack.MongoOptions{TLS: true, Root: devstack.User{Name: "root", Password: rolePassword}},
		Kafka: devstack.KafkaOptions{
			TLS: true, OAuth: true, Users: []devstack.User{{Name: "relay", Password: rolePassword}},
			Props: map[string]string{"listener.name.sasl_ssl.sasl.enabled.mechanisms": "SCRAM-SHA-512"},
		},
	})

	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, stack.CA(), 0o600); err != nil {
		t.Fatal(err)
	}
	return securedServers{stack, ca}
}

func (s securedServers) brokersOn(t *testing.T, l devstack.Listener) string {
	t.Helper()
	brokers, err := s.stack.BrokersOn(l)
	if err != nil {
		t.Fatal(err)
	}
	return "kafka.brokers=" + strings.Join(brokers, ",")
}

// runCommand runs a command with the secured replica set and the settings.
func (s securedServers) runCommand(t *testing.T, env []string, command string, settings ...string) (code int, out, errOut string) {
	t.Helper()
	env = slices.Concat([]string{"OUTRELAY_MONGODB_URI=" + s.stack.MongoURI(), "OUTRELAY_WATCH=shop.outbox", "OUTRELAY_HTTP_LISTEN=off"}, env)
	args := []string{command}
	for _, set := range settings {
		args = append(args, "--set", set)
	}
	return kit.RunCommand(t, env, args...)
}

// run exits with 1 if the servers reject its configuration. Its one line states the server, the reason and the fix, and
// the doctor states the same.
func TestRunEndsIfItCannotWork(t *testing.T) {
	t.Parallel()
	s := startSecuredServers(t)
	plain, sasl, tls, saslTLS := s.brokersOn(t, devstack.Plain), s.brokersOn(t, devstack.SASL), s.brokersOn(t, devstack.TLS), s.brokersOn(t, devstack.SASLTLS)
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte(devstack.UnsecuredToken("relay", time.Hour)), 0o600); err != nil {
		t.Fatal(err)
	}
	login := func(mechanism, password string) []string {
		return []string{"kafka.sasl.mechanism=" + mechanism, "kafka.sasl.username=relay", "kafka.sasl.password=" + password}
	}
	mongo := func(uri string) []string { return []string{"mongodb.uri=" + uri, plain} }
	overTLS := func(more ...string) []string { return append([]string{saslTLS, "kafka.tls.ca=" + s.ca}, more...) }
	iam := []string{"AWS_ACCESS_KEY_ID=id", "AWS_SECRET_ACCESS_KEY=" + rolePassword}

	for name, c := range map[string]struct {
		settings            []string
		server, reason, fix string
	}{
		"wrong password of MongoDB": {
			mongo(s.stack.MongoURIAs(devstack.User{Name: "root", Password: "other"})),
			"MongoDB", "the server rejects the user or the password (18)", "correct the user, the password and authSource",
		},
		"unknown authority of MongoDB": {
			mongo(s.stack.MongoURI() + "&tls=true"), "MongoDB", "signed by an unknown authority", "set mongodb.tls.ca",
		},
		"TLS to a MongoDB without it": {
			mongo(stacktest.MongoURI(t) + "&tls=true"), "MongoDB", "does not use TLS", "remove mongodb.tls",
		},
		"wrong password of Kafka":    {append(login("scram-sha-256", "other"), sasl), "Kafka", "user or password is wrong", "correct kafka.sasl.username and kafka.sasl.password"},
		"unknown authority of Kafka": {[]string{tls, "kafka.tls={}"}, "Kafka", "does not trust the authority", "set kafka.tls.ca"},
		"plain text to TLS":          {[]string{tls}, "Kafka", "it expects TLS", "set kafka.tls"},
		"TLS to plain text":          {[]string{plain, "kafka.tls={}"}, "Kafka", "does not support TLS", "remove kafka.tls"},
		"PLAIN to SCRAM":             {overTLS(login("plain", rolePassword)...), "Kafka", "does not offer SASL PLAIN", "set kafka.sasl.mechanism to scram-sha-512"},
		"a token to SCRAM":           {overTLS("kafka.sasl.mechanism=oauthbearer", "kafka.sasl.token.file="+token), "Kafka", "does not offer SASL OAUTHBEARER", "set kafka.sasl.mechanism to scram-sha-512"},
		"IAM to SCRAM":               {overTLS("kafka.sasl.mechanism=aws_msk_iam", "kafka.sasl.region=eu-west-1"), "Kafka", "does not offer SASL OAUTHBEARER", "set kafka.sasl.mechanism to scram-sha-512"},
		"SASL to a listener without": {append(login("scram-sha-512", rolePassword), plain), "Kafka", "does not offer SASL SCRAM-SHA-512", "remove kafka.sasl"},
	} {
		t.Run(name, func(t *testing.T) {
			code, out, errOut := s.runCommand(t, iam, "run", c.settings...)
			begin := "outrelay: " + c.server + " cannot be used: "
			if code != exitRejected || out != "" || !strings.HasPrefix(errOut, begin) || strings.Count(errOut, "\n") != 1 ||
				!strings.Contains(errOut, c.reason) || !strings.Contains(errOut, "; "+c.fix) {
				t.Errorf("run: exit code %d, stdout %q, stderr %q", code, out, errOut)
			}
			code, out, errOut = s.runCommand(t, iam, "doctor", c.settings...)
			if code != exitRejected || errOut != "" || !strings.Contains(out, c.reason) || !strings.Contains(out, "fix  "+c.fix) {
				t.Errorf("doctor: exit code %d, stdout %q, stderr %q", code, out, errOut)
			}
		})
	}
}

// From the moment at which MongoDB accepts only TLS, a connection without it is rejected with the reason.
func TestMongoDBThatRequiresTLS(t *testing.T) {
	t.Parallel()
	stack := stacktest.Own(t, devstack.Options{Mongods: 1, Quick: true, Mongo: devstack.MongoOptions{TLS: true}})
	client, err := mongo.Connect(options.Client().ApplyURI(stack.MongoURI()).SetTLSConfig(stack.TLSConfig()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = client.Disconnect(t.Context()) }()
	for _, mode := range []string{"preferTLS", "requireTLS"} {
		if err := client.Database("admin").RunCommand(t.Context(), bson.D{{Key: "setParameter", Value: 1}, {Key: "tlsMode", Value: mode}}).Err(); err != nil {
			t.Fatal(err)
		}
	}

	s := securedServers{stack: stack}
	code, _, errOut := s.runCommand(t, nil, "run", "kafka.brokers=127.0.0.1:1")
	if code != exitRejected || !strings.Contains(errOut, "expects TLS, and mongodb.tls is not set; set mongodb.tls") {
		t.Errorf("exit code %d, stderr %q", code, errOut)
	}
}

// A rejected or missing token of IAM is explained in the terms of AWS.
func TestRejectionsOfIAM(t *testing.T) {
	stacktest.OnlyWith(t, "it starts servers for two rejections", "slow")
	t.Parallel()
	s := startSecuredServers(t)
	settings := []string{s.brokersOn(t, devstack.SASL), "kafka.sasl.mechanism=aws_msk_iam", "kafka.sasl.region=eu-west-1"}

	for _, c := range []struct {
		env         []string
		reason, fix string
	}{
		{[]string{"AWS_ACCESS_KEY_ID=id", "AWS_SECRET_ACCESS_KEY=" + rolePassword}, "the broker rejects the token", "outrelay roles --only msk"},
		{[]string{"AWS_EC2_METADATA_DISABLED=true", "AWS_CONFIG_FILE=/dev/null", "AWS_SHARED_CREDENTIALS_FILE=/dev/null"}, "there is no token to log in with", "credentials of AWS"},
	} {
		code, out, errOut := s.runCommand(t, c.env, "doctor", settings...)
		if code != exitRejected || !strings.Contains(out, c.reason) || !strings.Contains(out, c.fix) || strings.Contains(out+errOut, rolePassword) {
			t.Errorf("exit code %d, stdout %q, stderr %q, want %d, and %q with %q", code, out, errOut, exitRejected, c.reason, c.fix)
		}
	}
}

// run waits for MongoDB that cannot be reached, reports that once, and exits with 75 after half a minute.
func TestRunWaitsForMongoDBThatIsAway(t *testing.T) {
	t.Parallel()
	env := []string{"OUTRELAY_MONGODB_URI=mongodb://127.0.0.1:1/?replicaSet=rs0", "OUTRELAY_KAFKA_BROKERS=127.0.0.1:2", "OUTRELAY_WATCH=shop.outbox", "OUTRELAY_HTTP_LISTEN=off"}
	code, out, errOut := kit.RunCommand(t, env, "run")
	lines := strings.Split(strings.TrimSpace(errOut), "\n")
	if code != exitTemporary || out != "" || len(lines) != 2 || !strings.Contains(lines[0], "waiting for MongoDB") ||
		!strings.HasPrefix(lines[1], "outrelay: MongoDB cannot be used: 127.0.0.1:1: connection refused") {
		t.Errorf("exit code %d, stdout %q, stderr %q", code, out, errOut)
	}
}

// dev explains given servers that cannot be used in the same words, with the variables that name them.
func TestDevExplainsGivenServers(t *testing.T) {
	t.Parallel()
	wrong := strings.Replace(stacktest.MongoURI(t), "mongodb://", "mongodb://nobody:"+rolePassword+"@", 1)

	for _, c := range []struct {
		uri, brokers string
		code         int
		want         string
	}{
		{"mongodb://127.0.0.1:1/", "127.0.0.1:2", exitTemporary, "outrelay: MongoDB cannot be used: 127.0.0.1:1: connection refused: no server listens on this port; correct the host and the port in OUTRELAY_TEST_MONGODB_URI, or start the server\n"},
		{wrong, "127.0.0.1:2", exitRejected, "outrelay: MongoDB cannot be used: the server rejects the user or the password (18); correct"},
		{stacktest.MongoURI(t), "127.0.0.1:2", exitTemporary, "outrelay: Kafka cannot be used: 127.0.0.1:2: the connection is refused: no process listens on this port (tried plain text without SASL); correct host and port in OUTRELAY_TEST_KAFKA, or start the broker\n"},
	} {
		env := []string{devstack.EnvMongoDB + "=" + c.uri, devstack.EnvKafka + "=" + c.brokers}
		code, out, errOut := kit.RunCommand(t, env, "dev", "--events", "10")
		if code != c.code || out != "" || !strings.Contains(errOut, c.want) || strings.Contains(errOut, rolePassword) {
			t.Errorf("exit code %d, stdout %q, stderr %q, want %d and %q", code, out, errOut, c.code, c.want)
		}
	}
}
