//go:build unix

package devstack_test

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/sasl"
	"github.com/segmentio/kafka-go/sasl/plain"
	"github.com/segmentio/kafka-go/sasl/scram"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// The secured listeners take the right password and certificate and no other, and ACLs bind.
func TestSecuredBroker(t *testing.T) {
	t.Parallel()
	s := stacktest.Own(t, devstack.Options{Brokers: 1, Quick: true, Kafka: devstack.KafkaOptions{
		Users: []devstack.User{{Name: "alice", Password: "alice-pw"}, {Name: "bob", Password: "bob-pw"}}, TLS: true, ACLs: true,
	}})
	topic := stacktest.Name(t)
	stacktest.CreateTopicOn(t, s.Brokers(), topic, 1, 1)
	allow(t, s, "User:alice", topic)

	scramAs := func(user, password string) sasl.Mechanism {
		m, err := scram.Mechanism(scram.SHA512, user, password)
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	cert, key, err := s.ClientCert("carol")
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	carol := s.TLSConfig()
	carol.Certificates = []tls.Certificate{pair}
	for _, c := range []struct {
		name     string
		listener devstack.Listener
		sasl     sasl.Mechanism
		tls      *tls.Config
		want     error // nil: the write succeeds
	}{
		{"plain password", devstack.SASL, plain.Mechanism{Username: "alice", Password: "alice-pw"}, nil, nil},
		{"scram", devstack.SASL, scramAs("alice", "alice-pw"), nil, nil},
		{"scram over TLS", devstack.SASLTLS, scramAs("alice", "alice-pw"), s.TLSConfig(), nil},
		{"TLS without certificate", devstack.TLS, nil, s.TLSConfig(), nil},
		{"wrong password", devstack.SASL, plain.Mechanism{Username: "alice", Password: "x"}, nil, kafka.SASLAuthenticationFailed},
		{"wrong scram password", devstack.SASL, scramAs("alice", "x"), nil, kafka.SASLAuthenticationFailed},
		{"no ACL", devstack.SASL, scramAs("bob", "bob-pw"), nil, kafka.TopicAuthorizationFailed},
		{"no ACL for a certificate", devstack.TLS, nil, carol, kafka.TopicAuthorizationFailed},
		{"no TLS to a TLS listener", devstack.TLS, nil, nil, errAny},
		{"unknown authority", devstack.TLS, nil, &tls.Config{MinVersion: tls.VersionTLS12}, errAny},
	} {
		brokers, err := s.BrokersOn(c.listener)
		if err != nil {
			t.Fatal(err)
		}
		// A slow broker sends another response for a while, or none.
		eventually(t, func() error {
			err := writeAs(t, brokers[0], topic, &kafka.Dialer{SASLMechanism: c.sasl, TLS: c.tls})
			switch {
			case err == nil && c.want != nil:
				t.Fatalf("%s: the write succeeded, want %v", c.name, c.want)
			case err != nil && !errors.Is(c.want, errAny) && !errors.Is(err, c.want):
				return fmt.Errorf("%s: %w, want %w", c.name, err, cmp.Or(c.want, errNone))
			}
			return nil
		})
	}
}

var errAny, errNone = errors.New("any error"), errors.New("none")

func allow(t *testing.T, s *devstack.Stack, user, topic string) {
	t.Helper()
	tr := &kafka.Transport{}
	defer tr.CloseIdleConnections()
	cl := &kafka.Client{Addr: kafka.TCP(s.Brokers()...), Transport: tr, Timeout: patience}
	var acls []kafka.ACLEntry
	for _, op := range []kafka.ACLOperationType{kafka.ACLOperationTypeWrite, kafka.ACLOperationTypeDescribe} {
		acls = append(acls, kafka.ACLEntry{
			ResourceType: kafka.ResourceTypeTopic, ResourceName: topic, ResourcePatternType: kafka.PatternTypeLiteral,
			Principal: user, Host: "*", Operation: op, PermissionType: kafka.ACLPermissionTypeAllow,
		})
	}

	res, err := cl.CreateACLs(t.Context(), &kafka.CreateACLsRequest{ACLs: acls})
	if err == nil {
		err = errors.Join(res.Errors...)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// writeAs writes one record on that listener; the bare connection hands the broker's rejection on.
func writeAs(t *testing.T, addr, topic string, d *kafka.Dialer) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
	defer cancel()
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return err
	}

	_ = conn.SetDeadline(time.Now().Add(15 * time.Second))
	partitions, err := conn.ReadPartitions(topic)
	if err = errors.Join(err, conn.Close()); err != nil {
		return err
	}
	if conn, err = d.DialPartition(ctx, "tcp", addr, partitions[0]); err != nil {
		return err
	}

	_ = conn.SetDeadline(time.Now().Add(15 * time.Second))
	_, err = conn.WriteMessages(kafka.Message{Value: []byte("v")})
	return errors.Join(err, conn.Close())
}
