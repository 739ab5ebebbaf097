//go:build unix

package doctor

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// issueCertificate returns a certificate for 127.0.0.1 that ends at this time, as files and as a pair.
func issueCertificate(t *testing.T, end time.Time) (cert, key string, pair tls.Certificate) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}

	made := &x509.Certificate{
		SerialNumber: big.NewInt(7), Subject: pkix.Name{CommonName: "the test's"}, NotBefore: end.Add(-time.Hour), NotAfter: end,
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
	}

	der, err := x509.CreateCertificate(rand.Reader, made, made, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}

	pkcs8, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}

	cert, key = filepath.Join(t.TempDir(), "cert.pem"), filepath.Join(t.TempDir(), "key.pem")
	for path, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "PRIVATE KEY", Bytes: pkcs8}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}

	return cert, key, tls.Certificate{Certificate: [][]byte{der}, PrivateKey: private}
}

// TestCertificatesAreExplained: the doctor explains each problem of a certificate. Real servers supply the rejections.
func TestCertificatesAreExplained(t *testing.T) {
	t.Parallel()
	s := stacktest.Own(t, devstack.Options{
		Mongods: 1, Brokers: 1, Quick: true, Mongo: devstack.MongoOptions{TLS: true},
		Kafka: devstack.KafkaOptions{TLS: true, Props: map[string]string{"listener.name.ssl.ssl.client.auth": "required"}},
	})
	brokers, err := s.BrokersOn(devstack.TLS)
	if err != nil {
		t.Fatal(err)
	}
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, s.CA(), 0o600); err != nil {
		t.Fatal(err)
	}
	otherCA, otherKey, _ := issueCertificate(t, time.Now().Add(time.Hour))
	oldCert, oldKey, old := issueCertificate(t, time.Now().Add(-time.Minute))
	look := func(uri string, set ...string) Report { return examine(t, loadConfig(t, uri, brokers, set...)) }

	r := look(s.MongoURI(), "mongodb.tls.ca="+otherCA, "kafka.tls.ca="+otherCA)
	expectCheck(t, r, "mongodb", Fail, "unknown authority", "mongodb.tls.ca")
	expectCheck(t, r, "kafka", Fail, "does not trust the authority", "kafka.tls.ca")
	expectCheck(t, r, "config.certificates", Warn, otherCA, "expires at", "without a restart")

	r = look(s.MongoURI(), "mongodb.tls.ca="+ca, "kafka.tls.ca="+ca)
	expectCheck(t, r, "mongodb", OK)
	expectCheck(t, r, "kafka", Fail, "certificate", "kafka.tls.cert")

	both := []string{"mongodb.tls.ca=" + ca, "kafka.tls.ca=" + ca}
	for _, side := range []string{"mongodb", "kafka"} {
		both = append(both, side+".tls.cert="+otherCA, side+".tls.key="+otherKey)
	}
	r = look(s.MongoURI(), both...)
	expectCheck(t, r, "mongodb", Fail, "rejects", "mongodb.tls.cert")
	expectCheck(t, r, "kafka", Fail, "certificate", "kafka.tls.cert")

	expectCheck(t, look(s.MongoURI(), "mongodb.tls.cert="+oldCert, "mongodb.tls.key="+oldKey), "config.certificates", Fail, "expired at", oldCert)

	addr := serve(t, func(c net.Conn) {
		_ = tls.Server(c, &tls.Config{Certificates: []tls.Certificate{old}}).HandshakeContext(context.Background())
	})
	expectCheck(t, look("mongodb://"+addr+"/", "mongodb.tls.ca="+oldCert, "kafka.brokers="+addr, "kafka.tls.ca="+oldCert), "mongodb", Fail, "has expired or is not yet valid", "renew the certificate, or correct this machine's clock")
	expectCheck(t, look("mongodb://"+addr+"/", "mongodb.tls.ca="+oldCert, "kafka.brokers="+addr, "kafka.tls.ca="+oldCert), "kafka", Fail, "has expired or is not yet valid", "renew it")
}
