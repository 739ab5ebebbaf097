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
func securityProps(props map[string]string, options KafkaOptions, authority *authority) {
	if len(options.Users) > 0 {
		mechanisms := sasl.With(sasl.Password)
		if options.OAuth {
			mechanisms = sasl.With(sasl.Password, sasl.Token)
		}
		var names []string
		for _, m := range mechanisms {
			names = append(names, m.Listener)
			jaas := "org.apache.kafka.common.security." + m.JavaModule + " required"
			// The brokers have the users of the other mechanisms with a password in their metadata.
			if m.Credential == sasl.Password && m.Clear {
				for _, u := range options.Users {
					jaas += fmt.Sprintf(" user_%s=%q", u.Name, u.Password)
				}
			}

			for _, l := range []Listener{SASL, SASLTLS} {
				prefix := "listener.name." + strings.ToLower(string(l)) + "." + strings.ToLower(m.Listener) + "."
				props[prefix+"sasl.jaas.config"] = jaas + ";"
				if m.Credential == sasl.Token {
					props[prefix+"connections.max.reauth.ms"] = strconv.FormatInt(options.Sessions.Milliseconds(), 10)
				}
			}
		}
		props["sasl.enabled.mechanisms"] = strings.Join(names, ",")
	}

	if options.TLS && authority != nil {
		props["ssl.keystore.type"] = "PEM"
		props["ssl.keystore.location"] = authority.serverFile
		props["ssl.truststore.type"] = "PEM"
		props["ssl.truststore.location"] = authority.caFile
		props["ssl.client.auth"] = "requested"
	}

	if options.ACLs {
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
func (s *Stack) mongodSecurity(options MongoOptions) (args []string, err error) {
	if options.TLS {
		args = append(args, "--tlsMode", "allowTLS", "--tlsCertificateKeyFile", s.tls.serverFile, "--tlsCAFile", s.tls.caFile,
			"--tlsAllowConnectionsWithoutCertificates")
	}

	if options.Root == (User{}) {
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
func createRoot(ctx context.Context, primary string, user User) error {
	_, err := runCommand(ctx, primary, bson.D{
		{Key: "createUser", Value: user.Name}, {Key: "pwd", Value: user.Password}, {Key: "roles", Value: bson.A{"root"}},
	})
	if err != nil {
		return fmt.Errorf("creating the user %s: %w", user.Name, err)
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

	certificate := newTemplate("outrelay devstack authority")
	certificate.IsCA, certificate.BasicConstraintsValid, certificate.KeyUsage = true, true, x509.KeyUsageCertSign
	der, err := x509.CreateCertificate(rand.Reader, certificate, certificate, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}

	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}

	authority := &authority{
		cert: cert, key: key, caPEM: pemBlock("CERTIFICATE", der),
		caFile: filepath.Join(dir, "ca.pem"), serverFile: filepath.Join(dir, "server.pem"),
	}

	chain, private, err := authority.issue("localhost")
	if err != nil {
		return nil, err
	}
	return authority, errors.Join(
		os.WriteFile(authority.caFile, authority.caPEM, 0o600),
		os.WriteFile(authority.serverFile, append(private, chain...), 0o600))
}

// issue returns a new signed certificate and its key, both as PEM.
func (a *authority) issue(name string) (chain, private []byte, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}

	certificate := newTemplate(name)
	certificate.DNSNames, certificate.IPAddresses = []string{"localhost"}, []net.IP{net.IPv4(127, 0, 0, 1)}
	certificate.KeyUsage = x509.KeyUsageDigitalSignature
	certificate.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}

	der, err := x509.CreateCertificate(rand.Reader, certificate, a.cert, &key.PublicKey, a.key)
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
	authority, err := newAuthority(s.dir)
	if err != nil {
		return fmt.Errorf("creating certificates: %w", err)
	}
	s.tls = authority
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
