package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	kafka "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/contract/sasl"
	"github.com/outrelay/outrelay/internal/lab/devstack"
	pkgconnect "github.com/outrelay/outrelay/internal/relay/connect"
)

// useConfig takes the servers from a configuration, with their logins.
func (b *bench) useConfig(cfg *config.Config) error {
	if b.MongoDB != "" || len(b.Kafka) > 0 {
		return errors.New("the configuration names the servers: leave out --mongodb and --kafka")
	}
	// The connectors have other options for their connections, so some settings of outrelay have no equivalent.
	if _, err := connectorSecurity(cfg.Kafka); err != nil {
		return err
	}
	if tlsConfig := cfg.MongoDB.TLS; tlsConfig != nil && (tlsConfig.Cert != "" || tlsConfig.ServerName != "" || tlsConfig.Insecure) {
		return errors.New("mongodb.tls: the connectors can use a ca only, no cert, server_name or insecure")
	}

	b.MongoDB, b.Kafka, b.login = cfg.MongoDB.URI.Reveal(), cfg.Kafka.Brokers, cfg
	return nil
}

// connectMongo returns a client with the login.
func (b *bench) connectMongo(ctx context.Context) (*mongo.Client, error) {
	if b.login == nil || b.login.MongoDB.TLS == nil {
		return connect(ctx, b.MongoDB)
	}
	clientOptions := options.Client().ApplyURI(b.MongoDB)
	if err := pkgconnect.SecureMongo(clientOptions, b.login.MongoDB.TLS, slog.New(slog.DiscardHandler), nil); err != nil {
		return nil, fmt.Errorf("mongodb.tls: %w", err)
	}
	return connectWith(ctx, clientOptions)
}

// secureKafka adds the login to the connections of the benchmark.
func (b *bench) secureKafka(transport *kafka.Transport) error {
	if b.login == nil {
		return nil
	}
	var err error
	if transport.TLS, err = b.login.Kafka.TLS.ClientConfig(); err != nil {
		return fmt.Errorf("kafka.tls: %w", err)
	}
	if sasl := b.login.Kafka.SASL; sasl != nil {
		transport.SASL, err = pkgconnect.NewLogin(*sasl, nil)
	}
	return err
}

// The variables of the relay's environment that have secrets.
const (
	uriVariable      = "BENCH_MONGODB_URI"
	passwordVariable = "BENCH_KAFKA_PASSWORD"
)

// addLogin adds the connections to the configuration of a relay. Secrets are in its environment.
func (b *bench) addLogin(mongo, brokers map[string]any) {
	if b.login == nil {
		return
	}

	mongo["uri"] = "${env:" + uriVariable + "}"
	if tlsConfig := b.login.MongoDB.TLS; tlsConfig != nil {
		mongo["tls"] = tlsSettings(*tlsConfig)
	}
	if tlsConfig := b.login.Kafka.TLS; tlsConfig != nil {
		brokers["tls"] = tlsSettings(*tlsConfig)
	}
	if sasl := b.login.Kafka.SASL; sasl != nil {
		brokers["sasl"] = map[string]any{"mechanism": sasl.Mechanism, "username": sasl.Username, "password": "${env:" + passwordVariable + "}"}
	}
}

func tlsSettings(tlsConfig config.TLS) map[string]any {
	out := map[string]any{}
	for name, file := range map[string]string{"ca": tlsConfig.CA, "cert": tlsConfig.Cert, "key": tlsConfig.Key} {
		if file != "" {
			out[name] = file
		}
	}
	return out
}

// loginEnv returns the secrets of addLogin.
func (b *bench) loginEnv() []string {
	if b.login == nil {
		return nil
	}
	env := []string{uriVariable + "=" + b.MongoDB}
	if sasl := b.login.Kafka.SASL; sasl != nil {
		env = append(env, passwordVariable+"="+sasl.Password.Reveal())
	}
	return env
}

// connectorSecurity returns the settings of Kafka Connect for the connections to Kafka.
func connectorSecurity(kafka config.Kafka) (map[string]string, error) {
	settings := map[string]string{}
	protocol := "PLAINTEXT"
	if tlsConfig := kafka.TLS; tlsConfig != nil {
		protocol = "SSL"
		if tlsConfig.ServerName != "" || tlsConfig.Insecure {
			return nil, errors.New("kafka.tls: Kafka Connect has no equivalent of server_name and insecure")
		}
		if tlsConfig.CA != "" {
			settings["ssl.truststore.type"], settings["ssl.truststore.location"] = "PEM", tlsConfig.CA
		}
		if tlsConfig.Cert != "" {
			for name, file := range map[string]string{"ssl.keystore.certificate.chain": tlsConfig.Cert, "ssl.keystore.key": tlsConfig.Key} {
				text, err := os.ReadFile(file)
				if err != nil {
					return nil, fmt.Errorf("kafka.tls: %w", err)
				}
				settings[name] = string(text)
			}
			settings["ssl.keystore.type"] = "PEM"
		}
	}

	if saslConfig := kafka.SASL; saslConfig != nil {
		protocol = "SASL_" + cmp.Or(map[string]string{"SSL": "SSL"}[protocol], "PLAINTEXT")
		mechanism, _ := sasl.Find(saslConfig.Mechanism)
		if mechanism.Credential != sasl.Password {
			return nil, fmt.Errorf("kafka.sasl.mechanism: a comparison can log in with %s only, not with %s",
				strings.Join(sasl.Names(sasl.Password), ", "), saslConfig.Mechanism)
		}
		quote := strings.NewReplacer(`\`, `\\`, `"`, `\"`)
		settings["sasl.mechanism"] = mechanism.Listener
		settings["sasl.jaas.config"] = fmt.Sprintf(`org.apache.kafka.common.security.%s required username="%s" password="%s";`,
			mechanism.JavaModule, quote.Replace(saslConfig.Username), quote.Replace(saslConfig.Password.Reveal()))
	}
	if protocol == "PLAINTEXT" {
		return settings, nil
	}
	settings["security.protocol"] = protocol

	// The worker, and the producers, consumers and administrators of its connectors.
	out := map[string]string{}
	for name, value := range settings {
		for _, prefix := range []string{"", "producer.", "consumer.", "admin."} {
			out[prefix+name] = value
		}
	}
	return out, nil
}

// trustStore returns the options of Java for a certificate authority of MongoDB. The driver for Java reads none from the URI.
func (b *comparison) trustStore(ctx context.Context, dir string) ([]string, error) {
	if b.login == nil || b.login.MongoDB.TLS == nil || b.login.MongoDB.TLS.CA == "" {
		return nil, nil
	}
	// The PATH may have only the java of an installation.
	java, err := devstack.FindJava(ctx)
	if err == nil {
		java, err = filepath.EvalSymlinks(java)
	}
	if err != nil {
		return nil, fmt.Errorf("finding keytool: %w", err)
	}

	store := filepath.Join(dir, "trust.p12")
	// The store has only public certificates.
	const password = "benchmark"
	cmd := exec.CommandContext(ctx, filepath.Join(filepath.Dir(java), "keytool"), "-importcert", "-noprompt", "-alias", "ca", "-file", b.login.MongoDB.TLS.CA,
		"-keystore", store, "-storetype", "PKCS12", "-storepass", password)
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("importing mongodb.tls.ca with keytool: %w\n%s", err, out)
	}
	return []string{"-Djavax.net.ssl.trustStore=" + store, "-Djavax.net.ssl.trustStorePassword=" + password}, nil
}

// connectorURI returns the URI for the driver for Java.
func (b *comparison) connectorURI() string {
	if b.login == nil || b.login.MongoDB.TLS == nil || strings.Contains(b.MongoDB, "tls=") {
		return b.MongoDB
	}
	separator := "&"
	if !strings.Contains(b.MongoDB, "?") {
		separator = "?"
		if strings.Count(b.MongoDB, "/") < 3 {
			separator = "/?"
		}
	}
	return b.MongoDB + separator + "tls=true"
}

// brokerLink sends requests to a broker.
type brokerLink interface {
	sendRequest(within time.Duration, req protocol.Message) (protocol.Message, error)
	closeConnection()
}

// pooledLink sends requests through the pool of kafka-go, which can log in. Its goroutines cost a few microseconds.
type pooledLink struct {
	transport *kafka.Transport
	addr      net.Addr
}

func (p pooledLink) sendRequest(within time.Duration, req protocol.Message) (protocol.Message, error) {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	return p.transport.RoundTrip(ctx, p.addr, req)
}

func (p pooledLink) closeConnection() {}

// dialLink connects a consumer to a broker.
func (b *bench) dialLink(ctx context.Context, addr string) (brokerLink, error) {
	if b.login == nil {
		return dialBroker(ctx, addr)
	}
	return pooledLink{b.cluster.transport, kafka.TCP(slices.Clone(b.Kafka)...)}, nil
}
