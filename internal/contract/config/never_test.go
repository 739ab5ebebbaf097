package config

import (
	"strings"
	"testing"
)

// A configuration that can never work is rejected before a server is asked.
func TestAConfigurationThatCanNeverWorkIsRejected(t *testing.T) {
	t.Parallel()
	const base = "kafka: {brokers: ['k:1']}\nmongodb: {uri: 'mongodb://h/shop"
	for text, want := range map[string]string{
		base + "'}\nwatch: [admin.outbox]":                   "watch[0] (line 3): found \"admin.outbox\"; this name belongs to the server",
		base + "'}\nwatch: [shop.orders_dead]":               "this name belongs to the server or to outrelay",
		base + "'}\nwatch: ['*.system.*']":                   "this name belongs to the server or to outrelay",
		base + "?tls=true&tlsCAFile=/nope.pem'}":             "mongodb.uri (line 2): the file /nope.pem cannot be read: no such file or directory",
		base + "?tls=true&tlsCertificateKeyFile=/nope.pem'}": "mongodb.uri (line 2): the pair /nope.pem and /nope.pem cannot be used",
		"kafka: {brokers: ['k:1']}\nmongodb: {uri: 'mongodb://u:p@h/?authMechanism=SCRAM-SHA-256&tls=true&tlsCAFile=/nope.pem'}": "mongodb.uri (line 2): the file /nope.pem cannot be read",
		"kafka: {brokers: ['k:1'}\nmongodb: {uri: 'mongodb://h/s'}":                                                              "did not find expected ',' or ']'",
	} {
		_, _, err := Load(writeConfig(t, text), nil, nil)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s:\n%v\nwant %s", text, err, want)
		}
	}
}
