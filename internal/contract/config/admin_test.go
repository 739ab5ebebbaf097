package config

import (
	"strings"
	"testing"
)

const adminBase = "mongodb: { uri: 'mongodb://h/shop' }\nkafka: { brokers: ['k:1'] }\nhttp: { admin: "

func TestAdminListener(t *testing.T) {
	t.Parallel()
	const token = "0123456789ab"
	c, warnings, err := Load(writeConfig(t, adminBase+"{ token: "+token+"x } }"), nil, nil)
	if err != nil {
		t.Fatal(err)
	}

	a := c.HTTP.Admin
	if a.Listen != "127.0.0.1:9465" || a.Anonymous != "none" || a.Payloads != "operator" || a.Rate != 50 || !a.IsLocal() || len(warnings) != 0 {
		t.Errorf("%+v %v", a, warnings)
	}

	for text, want := range map[string]string{
		"{}":                                     "no client can log in",
		"{ listen: ':9465', anonymous: viewer }": "only an address of this machine",
		"{ listen: 'ops:9465', anonymous: operator, token: " + token + "x }": "only an address of this machine",
		"{ listen: '127.0.0.1:9464', token: " + token + "x }":                "other than http.listen",
		"{ token: short }": "too short",
		"{ token: " + token + "x, viewer_token: " + token + "x }":           "the token decides the role",
		"{ token: " + token + "x, proxy: { from: [x] } }":                   "set the header",
		"{ proxy: { header: X-User } }":                                     "list the addresses of the proxy",
		"{ proxy: { header: Authorization, from: [10.0.0.0/8] } }":          "expected the name of a header",
		"{ proxy: { header: X-User, from: [ten] } }":                        "expected an address or a network",
		"{ tls: { cert: /nowhere, key: /nowhere }, token: " + token + "x }": "cannot be used",
		"{ tls: { client_ca: /nowhere } }":                                  "http.admin.tls.client_ca",
		"{ anonymous: everybody }":                                          "one of none, viewer, operator",
		"{ token: " + token + "x, prefix: outrelay }":                       "expected a path such as /outrelay",
		"{ token: " + token + "x, prefix: /ops/ }":                          "ends without one",
		"{ token: " + token + "x, prefix: /../ops }":                        "http.admin.prefix",
		"{ token: " + token + "x, prefix: '/a\"b' }":                        "http.admin.prefix",
		"{ listen: off, anonymous: operator }":                              "only an address of this machine",
		"{ token: " + token + "x, rate: 0 }":                                "http.admin.rate",
		"{ token: " + token + "x, redact: { paths: ['card'] } }":            "expected a path",
		"{ token: " + token + "x, redact: { headers: ['[a'] } }":            "expected the name of a header",
		"{ token: " + token + "x, operators: ['[a'] }":                      "expected a name",
	} {
		_, _, err := Load(writeConfig(t, adminBase+text+" }"), nil, nil)
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), token) {
			t.Errorf("%s: %v; want %q", text, err, want)
		}
	}

	for _, text := range []string{
		"{ anonymous: viewer }",
		"{ token: " + token + "x, prefix: /ops/outrelay-1.2 }",
		"{ listen: off }",
		"{ listen: 'localhost:0', anonymous: operator }",
		"{ listen: ':9465', proxy: { header: X-Forwarded-User, from: [10.1.2.3, '::1/128'] }, operators: ['*@ops'] }",
		"{ token: " + token + "x, redact: { paths: ['$.a.b', '$..password', '$.items[*].x[0]'], headers: ['x-*'] } }",
	} {
		if _, _, err := Load(writeConfig(t, adminBase+text+" }"), nil, nil); err != nil {
			t.Errorf("%s: %v", text, err)
		}
	}

	if _, warnings, err = Load(writeConfig(t, adminBase+"{ listen: ':9465', token: "+token+"x } }"), nil, nil); err != nil || len(warnings) != 1 || !strings.Contains(warnings[0], "unencrypted") {
		t.Errorf("%v %v", warnings, err)
	}
	if _, warnings, err = Load(writeConfig(t, adminBase+"{ listen: off, token: "+token+"x } }"), nil, nil); err != nil || len(warnings) != 0 {
		t.Errorf("without a listener: %v %v", warnings, err)
	}
	if n := (&Proxy{}).Networks(); len(n) != 0 {
		t.Errorf("%v", n)
	}
}
