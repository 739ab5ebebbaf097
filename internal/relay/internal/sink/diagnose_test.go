package sink

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"math/big"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/internal/contract/sasl"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"

	"github.com/outrelay/outrelay/internal/kafkawire"
)

// newCertificate returns a certificate for 127.0.0.1, and a pool that trusts it.
func newCertificate(t *testing.T) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}

	tmpl := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: "broker"},
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().Add(time.Hour),
		IPAddresses:           []net.IP{net.IPv4(127, 0, 0, 1)},
		IsCA:                  true,
		BasicConstraintsValid: true,
	}

	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}

	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}

	pool := x509.NewCertPool()
	pool.AddCert(cert)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pool
}

const secret = "s3cret-of-the-test"

func newLogin(mechanism, user, password string) *sasl.Login {
	return &sasl.Login{Mechanism: mechanism, User: user, Password: func() (string, error) { return password, nil }}
}

// findProblem returns the only problem of a configuration, and checks that its diagnosis is complete
// and has no secret.
func findProblem(t *testing.T, cfg testConfig, patience time.Duration) *kafkawire.Diagnosis {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*testTimeout)
	defer cancel()
	cfg.Patience = patience
	err := newClient(t, cfg).Diagnose(ctx)
	d, ok := errors.AsType[*kafkawire.Diagnosis](err)
	if !ok {
		t.Fatalf("got error %v, want a diagnosis", err)
	}
	if strings.Contains(err.Error(), secret) {
		t.Fatalf("the password is in the message: %v", err)
	}
	if d.Fix == "" || d.Text == "" || d.Tried == "" || d.Broker == "" || d.Err == nil {
		t.Errorf("incomplete diagnosis: %+v", d)
	}

	return d
}

// TestTLSAndSASLWork: the sink sends over TLS with each mechanism.
func TestTLSAndSASLWork(t *testing.T) {
	t.Parallel()
	cert, pool := newCertificate(t)
	_, brokers := newFakeCluster(t,
		kfake.NumBrokers(1),
		kfake.SeedTopics(1, "a"),
		kfake.TLS(&tls.Config{Certificates: []tls.Certificate{cert}}),
		kfake.EnableSASL(),
		kfake.Superuser("PLAIN", "u", secret),
		kfake.Superuser("SCRAM-SHA-256", "u", secret),
		kfake.Superuser("SCRAM-SHA-512", "u", secret))
	for _, mechanism := range []string{"plain", "scram-sha-256", "SCRAM-SHA-512"} {
		t.Run(mechanism, func(t *testing.T) {
			t.Parallel()
			cfg := testConfig{
				Brokers:       brokers,
				TLS:           &tls.Config{RootCAs: pool},
				SASL:          newLogin(mechanism, "u", secret),
				MaxBatchBytes: 3000,
			}
			if err := newClient(t, cfg).Diagnose(t.Context()); err != nil {
				t.Fatal(err)
			}

			r := openSink(t, sinkOptions{cfg: cfg})
			// The sink makes small and large writes over TLS.
			for range 300 {
				r.send(t, newRecord("a", "k", strings.Repeat("x", 1000)))
			}
			r.Flush()
			r.acks.waitResolved(300)
		})
	}
}

// TestDiagnosis: each common mistake in the configuration of a connection has its problem and its
// fix.
func TestDiagnosis(t *testing.T) {
	t.Parallel()
	cert, pool := newCertificate(t)
	_, secure := newFakeCluster(t,
		kfake.NumBrokers(1),
		kfake.TLS(&tls.Config{Certificates: []tls.Certificate{cert}}),
		kfake.EnableSASL(),
		kfake.Superuser("SCRAM-SHA-512", "u", secret))
	plain := stacktest.Brokers(t)
	trusted := &tls.Config{RootCAs: pool}
	good := newLogin("SCRAM-SHA-512", "u", secret)
	silent := listen(t, func(c net.Conn) { _, _ = c.Read(make([]byte, 1)) })
	web := listen(t, func(c net.Conn) {
		_, _ = c.Read(make([]byte, 100))
		_, _ = c.Write([]byte("HTTP/1.1 400 Bad Request\r\n\r\n"))
	})

	for name, c := range map[string]struct {
		cfg  testConfig
		want string // in the text
		fix  string
	}{
		"wrong password":            {testConfig{Brokers: secure, TLS: trusted, SASL: newLogin("SCRAM-SHA-512", "u", secret+"x")}, "user or password is wrong", "kafka.sasl.password"},
		"plain text to TLS":         {testConfig{Brokers: secure, SASL: good}, "it expects TLS", "kafka.tls"},
		"TLS to plain text":         {testConfig{Brokers: plain, TLS: trusted}, "does not support TLS", "remove kafka.tls"},
		"unknown authority":         {testConfig{Brokers: secure, TLS: &tls.Config{}, SASL: good}, "does not trust the authority", "kafka.tls.ca"},
		"another name":              {testConfig{Brokers: secure, TLS: &tls.Config{RootCAs: pool, ServerName: "kafka.example"}, SASL: good}, "not valid for the name", "name"},
		"no SASL":                   {testConfig{Brokers: secure, TLS: trusted}, "without authentication", "kafka.sasl"},
		"SASL where there is none":  {testConfig{Brokers: plain, SASL: newLogin("PLAIN", "u", secret)}, "does not offer SASL", "remove kafka.sasl, or"},
		"nothing listens":           {testConfig{Brokers: []string{"127.0.0.1:1"}}, "connection is refused", "start the broker"},
		"no such host":              {testConfig{Brokers: []string{"kafka.invalid:9092"}}, "cannot be resolved", "kafka.brokers"},
		"a listener that is silent": {testConfig{Brokers: []string{silent}}, "does not respond", "hang"},
		"something else":            {testConfig{Brokers: []string{web}}, "does not respond like a Kafka broker", "Kafka"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			patience := testTimeout / 2
			if c.fix == "hang" {
				// The default timeout ends the attempt.
				patience = 0
			}
			if d := findProblem(t, c.cfg, patience); !strings.Contains(d.Text, c.want) || !strings.Contains(d.Error(), c.fix) {
				t.Errorf("diagnosis %v (%v), want %q and %q", d, d.Err, c.want, c.fix)
			}
		})
	}
}

// listen accepts connections until the test ends, and calls serve with each of them. It returns its
// address.
func listen(t *testing.T, serve func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}

	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { _ = c.Close() })
			serve(c)
			if c, ok := c.(*net.TCPConn); ok {
				_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
				_, _ = c.Read(make([]byte, 1<<10))
			}
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-done
	})
	return l.Addr().String()
}

// TestDiagnosisOfAdvertisedListeners: the broker responds, but its advertised address cannot be
// reached.
func TestDiagnosisOfAdvertisedListeners(t *testing.T) {
	t.Parallel()
	kc, brokers := newFakeCluster(t, kfake.NumBrokers(1))
	kc.ControlKey(int16(kmsg.Metadata), func(req kmsg.Request) (kmsg.Response, error, bool) {
		kc.KeepControl()
		resp := req.ResponseKind().(*kmsg.MetadataResponse)
		b := kmsg.NewMetadataResponseBroker()
		b.NodeID, b.Host, b.Port = 0, "127.0.0.1", 1
		resp.Brokers = append(resp.Brokers, b)
		return resp, nil, true
	})

	d := findProblem(t, testConfig{Brokers: brokers}, testTimeout/2)
	named := d.Broker == "127.0.0.1:1" && strings.Contains(d.Error(), "advertised.listeners")
	if !strings.Contains(d.Text, "advertises this address") || !named {
		t.Errorf("diagnosis of %s: %v, want the advertised address 127.0.0.1:1", d.Broker, d)
	}
}

// TestDiagnosisAsksForTheOfferedMechanism: the fix names the mechanisms that the listener offers and outrelay supports.
func TestDiagnosisAsksForTheOfferedMechanism(t *testing.T) {
	t.Parallel()
	kc, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.EnableSASL(), kfake.Superuser("PLAIN", "u", secret))
	kc.ControlKey(int16(kmsg.SASLHandshake), func(req kmsg.Request) (kmsg.Response, error, bool) {
		resp := req.ResponseKind().(*kmsg.SASLHandshakeResponse)
		resp.ErrorCode, resp.SupportedMechanisms = kerr.UnsupportedSaslMechanism.Code, []string{"PLAIN", "GSSAPI"}
		return resp, nil, true
	})

	d := findProblem(t, testConfig{Brokers: brokers, SASL: newLogin("SCRAM-SHA-256", "u", secret)}, testTimeout/2)
	if !strings.Contains(d.Text, "does not offer SASL") || !strings.Contains(d.Error(), "set kafka.sasl.mechanism to plain, which") {
		t.Errorf("diagnosis %v, want the mechanism plain", d)
	}
}

// TestConfigReportsAllProblems: the error of an invalid configuration names all mistakes.
func TestConfigReportsAllProblems(t *testing.T) {
	t.Parallel()
	_, err := kafkawire.NewClient(kafkawire.Config{
		Brokers: []string{"no-port"},
		SASL:    &sasl.Login{Mechanism: "GSSAPI"},
	})
	if err == nil {
		t.Fatal("NewClient accepts an invalid configuration")
	}
	_, sinkErr := NewOpener(Config{Compression: "brotli", RequestsPerBroker: -1}, nil)
	if sinkErr == nil {
		t.Fatal("NewOpener accepts an invalid configuration")
	}
	err = errors.Join(err, sinkErr)

	for _, part := range []string{"no-port", "brotli", "GSSAPI", "password", "requests per broker"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q is missing in: %v", part, err)
		}
	}

	if _, err := kafkawire.NewClient(kafkawire.Config{}); err == nil || !strings.Contains(err.Error(), "no brokers") {
		t.Errorf("without brokers, got error %v", err)
	}
}
