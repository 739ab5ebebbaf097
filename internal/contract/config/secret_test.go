package config

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

const planted = "hunter2hunter2"

func TestSecretsPrintAsAsterisks(t *testing.T) {
	t.Parallel()
	type inner struct {
		S Secret
		u URI
		h Secret
	}
	values := []any{
		NewSecret(planted), NewURI("mongodb://user:" + planted + "@h/db?tlsCertificateKeyFilePassword=" + planted),
		&inner{S: NewSecret(planted), u: NewURI(planted), h: NewSecret(planted)},
		inner{S: NewSecret(planted), u: NewURI("a://" + planted + "@h"), h: NewSecret(planted)},
		map[string]Secret{"a": NewSecret(planted)},
		[]Secret{NewSecret(planted)},
		fmt.Errorf("bad: %v", NewSecret(planted)),
	}

	var out bytes.Buffer
	for _, v := range values {
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "%T"} {
			fmt.Fprintf(&out, verb+"\n", v)
		}
		js, _ := json.Marshal(v)
		out.Write(js)
		if y, err := yaml.Marshal(v); err == nil {
			out.Write(y)
		}
		for _, h := range []slog.Handler{slog.NewTextHandler(&out, nil), slog.NewJSONHandler(&out, nil)} {
			slog.New(h).Info("m", "v", v)
		}
	}

	if i := strings.Index(out.String(), planted); i >= 0 {
		t.Errorf("printed: …%s", out.String()[max(0, i-60):i+40])
	}
	for _, encoded := range []string{fmt.Sprintf("%x", planted), strings.Trim(fmt.Sprint([]byte(planted)), "[]")} {
		if strings.Contains(strings.ToLower(out.String()), encoded) {
			t.Errorf("printed as %s", encoded)
		}
	}
	if !strings.Contains(out.String(), "mongodb://***@h/db?tlsCertificateKeyFilePassword=***") {
		t.Error("the rest of the URI is gone")
	}
}

func TestURIRedaction(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"mongodb://h1,h2/db?replicaSet=rs0": "mongodb://h1,h2/db?replicaSet=rs0",
		"mongodb://u:p@h/db":                "mongodb://***@h/db",
		"mongodb://u:p@ss/w?rd#@h/db":       "mongodb://***@h/db",
		"mongodb+srv://u:p@h/?authMechanismProperties=AWS_SESSION_TOKEN:x&w=1": "mongodb+srv://***@h/?authMechanismProperties=***&w=1",
		"u:p@h":                        "***",
		"u p://x":                      "***",
		"http://user:p@collector:4318": "http://***@collector:4318",
	} {
		if got := NewURI(in).String(); got != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
}

// A password that is not percent-encoded is rejected, and no part of the address is in the error: its end looks like a host.
func TestUnencodedPasswordsAreRejected(t *testing.T) {
	t.Parallel()
	for _, password := range []string{"zq1@zq2", "zq1/zq2", "zq1@zq2/zq3", "zq1/zq2@zq3", "zq1:zq2", "zq1%zz", "zq1?zq2=1", "zq1#zq2", "27017/zq2"} {
		for _, address := range []string{"mongodb://user:" + password + "@127.0.0.1:27017/", "mongodb+srv://user:" + password + "@cluster.example.org/shop?w=1"} {
			_, _, err := Load("", append(base, "OUTRELAY_MONGODB_URI="+address), nil)
			if err == nil || !strings.Contains(err.Error(), "percent-encode") {
				t.Errorf("%s: %v", address, err)
			} else if text := err.Error(); strings.Contains(text, "zq") || strings.Contains(text, "27017") || strings.Contains(text, "cluster.example") {
				t.Errorf("%s: the error shows a part of it: %v", address, err)
			}
		}
	}

	for _, address := range []string{"mongodb://user:p%40s%2Fs@h/", "mongodb://user@h/shop?authMechanism=MONGODB-X509&tls=true", "mongodb://h1,h2/shop?appName=a"} {
		if _, _, err := Load("", append(base, "OUTRELAY_MONGODB_URI="+address), nil); err != nil {
			t.Errorf("%s: %v", address, err)
		}
	}
}

// TestPlantedSecretsNeverShow puts a secret into each place for one, and into wrong places of the right form.
// No output of the loading may contain it.
func TestPlantedSecretsNeverShow(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(file, []byte(planted+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	env := []string{"S=" + planted, "U=mongodb://u:" + planted + "@h", "LONG=" + planted + strings.Repeat("x", 300)}
	good := `
mongodb: { uri: "mongodb://user:` + planted + `@h1,h2/shop?authSource=admin" }
kafka: { brokers: [k:1], sasl: { mechanism: plain, username: u, password: "${file:` + file + `}" } }
http: { admin: { listen: "127.0.0.1:1", token: "${env:S}" } }
otel: { endpoint: "https://u:` + planted + `@collector" }
`
	c, warnings, err := Load(writeConfig(t, good), env, nil)
	if err != nil {
		t.Fatal(err)
	}
	if c.Kafka.SASL.Password.Reveal() != planted || c.HTTP.Admin.Token.Reveal() != planted || !strings.Contains(c.MongoDB.URI.Reveal(), planted) {
		t.Fatal("the secrets did not arrive")
	}
	js, _ := json.Marshal(c)
	shown, _, err := Print(writeConfig(t, good), env, nil)
	if err != nil {
		t.Fatal(err)
	}
	out := fmt.Sprintln(shown, string(js), warnings) + fmt.Sprintf("%v %+v %#v", c, c, c)

	for _, bad := range []string{
		`mongodb: { uri: "user:` + planted + `@host" }`,
		`mongodb: { uri: "mongodb://user:` + planted + `@" }`,
		`mongodb: { uri: "mongodb://user:` + planted + `/x@host:99999999" }`,
		`mongodb: { uri: "mongodb://user:%zz` + planted + `@host" }`,
		`mongodb: { uri: "mongodb://host/?tlsCertificateKeyFilePassword=` + planted + `&tls=perhaps" }`,
		`mongodb: { uri: "mongodb://host/?authMechanism=PLAIN&authMechanismProperties=A:` + planted + `" }`,
		`mongodb: { uri: ["` + planted + `"] }`,
		`mongodb: "` + planted + `"`,
		`kafka: { sasl: "` + planted + `" }`,
		`kafka: { sasl: { password: [` + planted + `] } }`,
		`kafka: { sasl: { pasword: ` + planted + ` } }`,
		`kafka: { brokers: ["u:` + planted + `@k:9092"] }`,
		`retention: "${env:S}"`,
		`topics: { template: "${env:S} {x}" }`,
		`topics: { template: "${file:` + file + `}" }`,
		`topics: { template: "a b ${env:LONG}" }`,
		`topics: { allow: ["${env:S} !"] }`,
		`topics: { rules: [{ to: "${env:S} !" }] }`,
		`watch: ["${file:` + file + `}"]`,
		`watch: "${env:S},a.b"`,
		`kafka: { brokers: ["${env:U}"] }`,
		`kafka: { brokers: "${env:U}" }`,
		`mongodb: { tls: { ca: "/${env:S}/ca.pem" } }`,
		`node: "${env:S} !"`,
		`state: { database: "${env:S}/" }`,
		`record: { headers: { a: "{${env:S}" } }`,
		`log: { level: "${file:` + file + `}" }`,
		`limits: { tickets: "${env:S}" }`,
		`http: { admin: { token: "${env:S} ${env:MISSING}" } }`,
		`otel: { endpoint: "ftp://u:` + planted + `@x" }`,
		`topics: { create: { configs: { a: [` + planted + `] } } }`,
		"kafka: { sasl: { password: `" + planted + "` } }",
		`kafka: { sasl: { password: *` + planted + ` } }`,
		`kafka: { sasl: { password: !!int ` + planted + ` } }`,
		"? { p: " + planted + " }\n: x",
		"? [ " + planted + " ]\n: x",
		"kafka: { ? [ " + planted + " ] : x }",
		"%" + planted + "\n---\na: b",
		`kafka: { sasl: { password: "\q` + planted + `" } }`,
		planted,
	} {
		_, _, err := Load(writeConfig(t, bad), env, nil)
		if err == nil {
			t.Errorf("accepted: %s", bad)
		}
		js, _ := json.Marshal(err)
		out += fmt.Sprintf("%v %+v %#v %s\n", err, err, err, js)
	}
	_, _, err = Load("mongodb://u:"+planted+"@h/db", env, nil)
	out += fmt.Sprint(err)
	// Numbers must not be quoted either.
	for _, number := range []string{"password: 20262026", "token: 20262026"} {
		_, _, err = Load(writeConfig(t, "kafka: { sasl: {"+number+"} }\nhttp: { admin: {"+number+"} }"), env, nil)
		out += strings.ReplaceAll(fmt.Sprint(err), "20262026", planted)
	}
	_, _, err = Load("", append(slices.Clone(env), "OUTRELAY_KAFKA_SASL={"+planted, "OUTRELAY_MONGODB_URI="+planted), []string{"kafka.sasl.password.x=" + planted, planted + "x"})
	out += fmt.Sprint(err)
	if i := strings.Index(out, planted); i >= 0 {
		t.Errorf("printed: …%s", out[max(0, i-200):i+40])
	}
}

// Settings that weaken the protection of a connection or a key cause warnings.
func TestWeakProtectionIsWarnedOf(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	open, closed := filepath.Join(dir, "open.pem"), filepath.Join(dir, "closed.pem")
	for file, mode := range map[string]os.FileMode{open: 0o644, closed: 0o600} {
		if err := os.WriteFile(file, nil, mode); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(file, mode); err != nil {
			t.Fatal(err)
		}
	}

	c := Default()
	c.MongoDB.URI = NewURI("mongodb://h/?tls=true&tlsInsecure=true")
	c.MongoDB.TLS, c.Kafka.TLS = &TLS{Insecure: true, Key: open}, &TLS{Key: closed}
	got := strings.Join(c.findWarnings(), "\n")
	for _, want := range []string{"mongodb.tls.insecure accepts", "mongodb.uri accepts", "mongodb.tls.key: every user"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is not in\n%s", want, got)
		}
	}

	if strings.Contains(got, closed) || strings.Contains(got, "kafka") {
		t.Errorf("%s", got)
	}

	c.MongoDB = MongoDB{URI: NewURI("mongodb://h/?tls=true")}
	if got := c.findWarnings(); len(got) != 0 {
		t.Errorf("%v", got)
	}
}

// A reference may stand for a secret at any key: the printed configuration has the reference itself. It
// reads the same again.
func TestPrintShowsReferencesAsTheyWereWritten(t *testing.T) {
	t.Parallel()
	cert, _ := writeKeyPair(t)
	file := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(file, []byte(planted+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}

	env := []string{"S=" + planted, "CA=" + cert, "LIST=" + planted + ".a," + planted + ".b", "PORT=9464", "WAIT=7s", "U=mongodb://u:" + planted + "@h1/shop"}
	text := `
node: "n-${env:S}"
mongodb: { uri: "${env:U}", tls: { ca: "${env:CA}" } }
watch: "${env:LIST}"
kafka: { brokers: ["k:1", "${file:` + file + `}:1"], sasl: { mechanism: plain, username: "${env:S}", password: "${env:S}" } }
record: { headers: { a: "${env:S}" } }
topics: { allow: ["${env:S}"], rules: [ { match: { type: "${env:S}" }, to: [ "${env:S}" ] } ], create: { configs: { retention.ms: "${env:S}" } } }
http: { listen: "127.0.0.1:${env:PORT}" }
otel: { endpoint: "http://u:${env:S}@collector/${env:S}" }
lease: { ttl: "${env:WAIT}" }
`

	// LEVEL is not set.
	shown, _, err := Print(writeConfig(t, text), env, []string{"log.level=${env:LEVEL}"})
	if err == nil || shown != "" {
		t.Errorf("with a mistake: %v, %s", err, shown)
	}

	shown, _, err = Print(writeConfig(t, text), append(env, "LEVEL=warn"), []string{"log.level=${env:LEVEL}"})
	if err != nil {
		t.Fatal(err)
	}

	if i := strings.Index(shown, planted); i >= 0 {
		t.Errorf("printed: …%s", shown[max(0, i-60):i+40])
	}

	for _, want := range []string{
		`node: "n-${env:S}"`, `watch: "${env:LIST}"`, `- "${file:` + file + `}:1"`, `username: "${env:S}"`, `retention.ms: "${env:S}"`,
		`listen: "127.0.0.1:${env:PORT}"`, `ttl: "${env:WAIT}"`, `level: "${env:LEVEL}"`, `ca: "${env:CA}"`,
		"uri: mongodb://***@h1/shop", `endpoint: "http://***@collector/${env:S}"`, "password: '***'",
	} {
		if !strings.Contains(shown, want) {
			t.Errorf("no %s in\n%s", want, shown)
		}
	}

	// The printed text, loaded again, differs only in log.level, which only Print was given with --set.
	set := []string{"mongodb.uri=mongodb://h1/shop", "kafka.sasl.password=p", "otel.endpoint=http://c"}
	first, err := loadChecked(writeConfig(t, text), append(env, "LEVEL=warn"), set)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := loadChecked(writeConfig(t, shown), append(env, "LEVEL=warn"), set); err != nil || len(DifferingKeys(first, again)) != 1 {
		t.Errorf("%v, differing: %v", err, DifferingKeys(first, again))
	}
}

func loadChecked(file string, env, set []string) (Config, error) {
	c, _, err := Load(file, env, set)
	return c, err
}
