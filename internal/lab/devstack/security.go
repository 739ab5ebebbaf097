package devstack

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/sasl"
)

// securityProps adds the properties of the SASL and TLS listeners and the authorizer.
func securityProps(props map[string]string, k KafkaOptions, a *authority) {
	if len(k.Users) > 0 {
		mechanisms := sasl.With(sasl.Password)
		if k.OAuth {
			mechanisms = sasl.With(sasl.Password, sasl.Token)
		}
		var names []string
		for _, m := range mechanisms {
			names = append(names, m.Listener)
			jaas := "org.apache.kafka.common.security." + m.JavaModule + " required"
			// The brokers have the users of the other mechanisms with a password in their metadata.
			if m.Credential == sasl.Password && m.Clear {
				for _, u := range k.Users {
					jaas += fmt.Sprintf(" user_%s=%q", u.Name, u.Password)
				}
			}

			for _, l := range []Listener{SASL, SASLTLS} {
				prefix := "listener.name." + strings.ToLower(string(l)) + "." + strings.ToLower(m.Listener) + "."
				props[prefix+"sasl.jaas.config"] = jaas + ";"
				if m.Credential == sasl.Token {
					props[prefix+"connections.max.reauth.ms"] = strconv.FormatInt(k.Sessions.Milliseconds(), 10)
				}
			}
		}
		props["sasl.enabled.mechanisms"] = strings.Join(names, ",")
	}

	if k.TLS && a != nil {
		props["ssl.keystore.type"] = "PEM"
		props["ssl.keystore.location"] = a.serverFile
		props["ssl.truststore.type"] = "PEM"
		props["ssl.truststore.location"] = a.caFile
		props["ssl.client.auth"] = "requested"
	}

	if k.ACLs {
		props["authorizer.class.name"] = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
		// Clients of the plain listener: the brokers themselves and the setup of the test.
		props["super.users"] = "User:ANONYMOUS"
	}
}

// UnsecuredToken returns a token for a user. It has no signature: only brokers of tests accept it.
func UnsecuredToken(user string, lifetime time.Duration) string {
	part := func(text string) string { return base64.RawURLEncoding.EncodeToString([]byte(text)) }
	now := time.Now()
	claims := fmt.Sprintf(`{"sub":%q,"iat":%d,"exp":%.3f}`, user, now.Unix(), float64(now.Add(lifetime).UnixMilli())/1000)
	return part(`{"alg":"none"}`) + "." + part(claims) + "."
}

func (o MongoOptions) secured() bool { return o.TLS || o.Root != (User{}) }

// mongodSecurity returns the arguments for TLS and access control. It writes the common key of the members into the
// directory of the stack.
func (s *Stack) mongodSecurity(o MongoOptions) (args []string, err error) {
	if o.TLS {
		args = append(args, "--tlsMode", "allowTLS", "--tlsCertificateKeyFile", s.tls.serverFile, "--tlsCAFile", s.tls.caFile,
			"--tlsAllowConnectionsWithoutCertificates")
	}

	if o.Root == (User{}) {
		return args, nil
	}

	path := filepath.Join(s.dir, "mongod.key")
	if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
		if err := os.WriteFile(path, []byte(rand.Text()+rand.Text()), 0o600); err != nil {
			return nil, err
		}
	}
	return append(args, "--keyFile", path), nil
}

// createRoot creates the first user. While there is no user, every client on the same machine may do this.
func createRoot(ctx context.Context, primary string, u User) error {
	_, err := runCommand(ctx, primary, bson.D{
		{Key: "createUser", Value: u.Name}, {Key: "pwd", Value: u.Password}, {Key: "roles", Value: bson.A{"root"}},
	})
	if err != nil {
		return fmt.Errorf("creating the user %s: %w", u.Name, err)
	}
	return nil
}

// authority signs the certificates of one stack.
type authority struct {
	cert               *x509.Certificate
	key                *ecdsa.PrivateKey
	caPEM              []byte
	caFile, serverFile string
}

// newAuthority creates the authority, and the servers' certificate for 127.0.0.1 and localhost, as files in dir.
func newAuthority(dir string) (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}

	t := newTemplate("outrelay devstack authority")
	t.IsCA, t.BasicConstraintsValid, t.KeyUsage = true, true, x509.KeyUsageCertSign
	der, err := x509.CreateCertificate(rand.Reader, t, t, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}

	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}

	a := &authority{
		cert: cert, key: key, caPEM: pemBlock("CERTIFICATE", der),
		caFile: filepath.Join(dir, "ca.pem"), serverFile: filepath.Join(dir, "server.pem"),
	}

	chain, private, err := a.issue("localhost")
	if err != nil {
		return nil, err
	}
	return a, errors.Join(
		os.WriteFile(a.caFile, a.caPEM, 0o600),
		os.WriteFile(a.serverFile, append(private, chain...), 0o600))
}

// issue returns a new signed certificate and its key, both as PEM.
func (a *authority) issue(name string) (chain, private []byte, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}

	t := newTemplate(name)
	t.DNSNames, t.IPAddresses = []string{"localhost"}, []net.IP{net.IPv4(127, 0, 0, 1)}
	t.KeyUsage = x509.KeyUsageDigitalSignature
	t.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}

	der, err := x509.CreateCertificate(rand.Reader, t, a.cert, &key.PublicKey, a.key)
	if err != nil {
		return nil, nil, err
	}

	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, nil, err
	}
	return append(pemBlock("CERTIFICATE", der), a.caPEM...), pemBlock("PRIVATE KEY", pkcs8), nil
}

func newTemplate(name string) *x509.Certificate {
	return &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()),
		Subject:      pkix.Name{CommonName: name},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(7 * 24 * time.Hour),
	}
}

func pemBlock(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

// RenewTLS replaces the authority and the servers' certificate. A member uses the new ones after its next start. CA,
// TLSConfig and ClientCert use them at once.
func (s *Stack) RenewTLS() error {
	if s.tls == nil {
		return errors.New("the stack has no TLS: enable it in Options.Mongo or Options.Kafka")
	}
	a, err := newAuthority(s.dir)
	if err != nil {
		return fmt.Errorf("creating certificates: %w", err)
	}
	s.tls = a
	return nil
}

// CA returns the certificate of the authority of the servers' certificates, as PEM. Without TLS it returns nil.
func (s *Stack) CA() []byte {
	if s.tls == nil {
		return nil
	}
	return s.tls.caPEM
}

// TLSConfig returns a configuration that trusts the servers' certificates. Without TLS it returns nil.
func (s *Stack) TLSConfig() *tls.Config {
	if s.tls == nil {
		return nil
	}
	pool := x509.NewCertPool()
	pool.AddCert(s.tls.cert)
	return &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
}

// ClientCert returns a certificate with the common name and its key, as PEM. The servers trust it. On the brokers'
// TLS listener, its user is "CN=<name>".
func (s *Stack) ClientCert(name string) (cert, key []byte, err error) {
	if s.tls == nil {
		return nil, nil, errors.New("the stack has no TLS: enable it in Options.Mongo or Options.Kafka")
	}
	return s.tls.issue(name)
}
