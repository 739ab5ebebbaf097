package config

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// writeKeyPair writes a self-signed certificate and its key.
func writeKeyPair(t *testing.T) (cert, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}

	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}

	keyDER, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}

	cert, key = filepath.Join(t.TempDir(), "cert.pem"), filepath.Join(t.TempDir(), "key.pem")
	for path, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "EC PRIVATE KEY", Bytes: keyDER}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return cert, key
}

func TestTLSClient(t *testing.T) {
	t.Parallel()
	if c, err := (*TLS)(nil).ClientConfig(); c != nil || err != nil {
		t.Errorf("%v, %v", c, err)
	}
	if c, err := (&TLS{}).ClientConfig(); err != nil || c.MinVersion != tls.VersionTLS12 || c.RootCAs != nil || c.InsecureSkipVerify {
		t.Errorf("%+v, %v", c, err)
	}
	cert, key := writeKeyPair(t)
	c, err := (&TLS{CA: cert, Cert: cert, Key: key, ServerName: "db", Insecure: true}).ClientConfig()
	if err != nil || c.RootCAs == nil || len(c.Certificates) != 1 || c.ServerName != "db" || !c.InsecureSkipVerify {
		t.Errorf("%+v, %v", c, err)
	}
}

func TestTLSProblems(t *testing.T) {
	t.Parallel()
	cert, key := writeKeyPair(t)
	for want, one := range map[string]TLS{
		"kafka.tls.ca: the file " + key + " holds no certificate": {CA: key},
		"kafka.tls.ca: the file /no/such cannot be read":          {CA: "/no/such"},
		"kafka.tls.key: required with cert":                       {Cert: cert},
		"kafka.tls.cert: required with key":                       {Key: key},
		"kafka.tls.cert: the pair " + key + " and " + cert:        {Cert: key, Key: cert},
	} {
		if _, err := one.ClientConfig(); err == nil {
			t.Errorf("no error: %s", want)
		}

		set := []string{"kafka.tls={}"}
		for name, value := range map[string]string{"ca": one.CA, "cert": one.Cert, "key": one.Key} {
			if value != "" {
				set = append(set, "kafka.tls."+name+"="+value)
			}
		}

		if _, _, err := Load("", base, set); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}
