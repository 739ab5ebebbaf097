package process_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
)

// TestN05_DeposedOwnerIsNotCountedAsFenced: an owner that was suspended often learns from Kafka first that another one has taken over. That
// is no other program with its transactional id, however often it happens.
func TestN05_DeposedOwnerIsNotCountedAsFenced(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.start("lease.renew=6s") // Kafka is faster
	watchers := b.state.Collection("watchers")
	for i := range 4 {
		b.log.wait(t, fmt.Sprintf("took over\" epoch=%d", 1+2*i))
		b.append(5)
		b.consume(5 * (2*i + 1))
		var doc lease.Document
		if err := watchers.FindOne(t.Context(), bson.D{}).Decode(&doc); err != nil {
			t.Fatal(err)
		}
		senders := doc.Senders()
		b.fenceTopic(fmt.Sprintf("outrelay.%s.%s#%d", doc.Instance, strings.ReplaceAll(doc.ID, "/", "."), senders[len(senders)-1].Generation))
		// Another owner has acquired the lease, and was killed.
		_, err := watchers.UpdateOne(t.Context(), bson.D{}, bson.D{
			{Key: "$set", Value: bson.D{{Key: "owner", Value: "another/1"}, {Key: "expiresAt", Value: time.Now().Add(-time.Minute)}}},
			{Key: "$inc", Value: bson.D{{Key: "epoch", Value: int64(1)}}},
		})
		if err != nil {
			t.Fatal(err)
		}
		b.append(5)
	}

	b.consume(40)
	if all := b.log.wait(t, "epoch=9"); strings.Contains(all, "although it holds the lease") || strings.Contains(all, "halted") {
		t.Errorf("a deposition was taken for another program:\n%s", all)
	}
}

// fenceTopic takes a transactional id and writes a marker into each partition, as a takeover does.
func (b *bundle) fenceTopic(id string) {
	b.t.Helper()
	tr := &kafka.Transport{}
	defer tr.CloseIdleConnections()
	c := &kafka.Client{Addr: kafka.TCP(stacktest.Brokers(b.t)...), Transport: tr}
	ctx, cancel := context.WithTimeout(b.t.Context(), patience)
	defer cancel()
	again := func(what string, f func() error) {
		b.t.Helper()
		stacktest.Eventually(b.t, what, func() bool {
			err := f()
			if err != nil {
				b.t.Logf("%s: %v", what, err)
			}
			return err == nil
		})
	}

	var p *kafka.ProducerSession
	again("taking the id", func() error {
		r, err := c.InitProducerID(ctx, &kafka.InitProducerIDRequest{TransactionalID: id, TransactionTimeoutMs: 60_000, ProducerID: -1, ProducerEpoch: -1})
		if err == nil {
			p, err = r.Producer, r.Error
		}
		return err
	})

	again("adding partitions", func() error {
		parts := []kafka.AddPartitionToTxn{{Partition: 0}, {Partition: 1}, {Partition: 2}}
		r, err := c.AddPartitionsToTxn(ctx, &kafka.AddPartitionsToTxnRequest{
			TransactionalID: id, ProducerID: p.ProducerID, ProducerEpoch: p.ProducerEpoch, Topics: map[string][]kafka.AddPartitionToTxn{b.topic: parts},
		})
		if err != nil {
			return err
		}
		return r.Topics[b.topic][0].Error
	})

	again("ending the transaction", func() error {
		r, err := c.EndTxn(ctx, &kafka.EndTxnRequest{TransactionalID: id, ProducerID: p.ProducerID, ProducerEpoch: p.ProducerEpoch})
		if err == nil {
			err = r.Error
		}
		return err
	})

	again("waiting for the markers", func() error {
		r, err := c.InitProducerID(ctx, &kafka.InitProducerIDRequest{TransactionalID: id, TransactionTimeoutMs: 60_000, ProducerID: p.ProducerID, ProducerEpoch: p.ProducerEpoch})
		if err == nil {
			err = r.Error
		}
		return err
	})
}
