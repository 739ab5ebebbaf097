package config

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// A configuration whose secrets are elsewhere is checked, apart from the values that depend on them.
func TestLoadWithoutSecrets(t *testing.T) {
	t.Parallel()
	file := writeConfig(t, `
mongodb:
  uri: "${file:/no/such/outrelay/mongodb-uri}"
  tls: { ca: /no/such/outrelay/ca.crt }
watch: [shop.outbox]
kafka:
  brokers: ["${env:NO_SUCH_BROKER}"]
  sasl: { mechanism: scram-sha-512, username: "${file:/no/such/kafka/user}", password: "${file:/no/such/kafka/password}" }
  tls: { cert: /no/such/kafka/tls.crt, key: /no/such/kafka/tls.key }
http:
  listen: 0.0.0.0:9464
  admin:
    listen: 0.0.0.0:9465
    viewer_token: "${file:/no/such/viewer}"
    tls: { cert: /no/such/tls.crt, key: /no/such/tls.key }
`)

	_, warnings, err := LoadWithoutSecrets(file, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"http.admin.tls.cert is not checked: the pair /no/such/tls.crt and /no/such/tls.key cannot be used: no such file or directory",
		"http.admin.viewer_token is not checked: the file /no/such/viewer cannot be read: no such file or directory",
		"kafka.brokers[0] is not checked: the environment variable NO_SUCH_BROKER is not set",
		"kafka.sasl.password is not checked: the file /no/such/kafka/password cannot be read: no such file or directory",
		"kafka.sasl.username is not checked: the file /no/such/kafka/user cannot be read: no such file or directory",
		"kafka.tls.cert is not checked: the pair /no/such/kafka/tls.crt and /no/such/kafka/tls.key cannot be used: no such file or directory",
		"mongodb.tls.ca is not checked: the file /no/such/outrelay/ca.crt cannot be read: no such file or directory",
		"mongodb.uri is not checked: the file /no/such/outrelay/mongodb-uri cannot be read: no such file or directory",
	}
	if diff := cmp.Diff(want, warnings); diff != "" {
		t.Error(diff)
	}
	if _, _, err := Load(file, nil, nil); err == nil {
		t.Error("with secrets, a missing file is no problem")
	}
}

// All other problems of such a configuration are reported.
func TestLoadWithoutSecretsReportsAllElse(t *testing.T) {
	t.Parallel()
	_, _, err := LoadWithoutSecrets(writeConfig(t, `
mongodb: { uri: "${file:/no/such/uri}", tls: { cert: /no/such/tls.crt } }
kafka:
  broker: x
  sasl: { mechanism: scram, password: "${file:/no/such/password" }
http: { listen: 9464, admin: { viewer_token: "${file:/no/such/viewer}", anonymous: viewer, listen: 0.0.0.0:9465 } }
lease: { ttl: 1s, renew: 1s }
`), nil, nil)
	if err == nil {
		t.Fatal("no problems")
	}

	for _, want := range []string{
		"kafka.broker (line 4): unknown key; did you mean kafka.brokers?",
		"kafka.sasl.mechanism (line 5): found \"scram\"; expected one of",
		"kafka.sasl.password (line 5): a ${ without a closing }",
		"mongodb.tls.key (line 2): required with cert and not set",
		"http.listen (line 6): found \"9464\"; expected host:port, or off",
		"http.admin.anonymous (line 6): found viewer",
		"lease.renew (line 7): found 1s; expected at most a third of lease.ttl",
		"kafka.brokers (line 3): required and not set",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in\n%v", want, err)
		}
	}
	if strings.Contains(err.Error(), "/no/such") {
		t.Errorf("a missing file is a problem: %v", err)
	}
}
