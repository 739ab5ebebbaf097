package devstack_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// If a topic is created after the tail began, the tail reads it from its first record, in order, with the offsets that
// a consumer gets.
func TestTail(t *testing.T) {
	brokers := stacktest.Brokers(t)
	topic, late := stacktest.Topic(t, 2), stacktest.Name(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	got, ended := make(chan devstack.Message, 100), make(chan struct{})
	go func() {
		defer close(ended)
		devstack.Tail(ctx, brokers, []string{topic, late}, func(m devstack.Message) { got <- m })
	}()

	stacktest.CreateTopic(t, late, 1)
	tr := &kafka.Transport{}
	defer tr.CloseIdleConnections()
	cl := &kafka.Client{Addr: kafka.TCP(brokers...), Transport: tr}
	for i, to := range []string{topic, late, topic, late} {
		for {
			res, err := cl.Produce(ctx, &kafka.ProduceRequest{Topic: to, RequiredAcks: kafka.RequireAll, Records: kafka.NewRecordReader(kafka.Record{
				Key: kafka.NewBytes([]byte("k")), Value: kafka.NewBytes([]byte(fmt.Sprint(i))), Headers: []kafka.Header{{Key: "id", Value: []byte(fmt.Sprint("id", i))}},
			})})
			if err == nil {
				err = res.Error
			}
			// A broker that does not have the new topic yet has no records of it.
			if errors.Is(err, kafka.UnknownTopicOrPartition) && ctx.Err() == nil {
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			break
		}
	}

	last := map[string]string{}
	for range 4 {
		select {
		case m := <-got:
			if string(m.Key) != "k" || m.Header("id") != "id"+string(m.Value) || m.Header("none") != "" || m.Seen.IsZero() || last[m.Topic] >= string(m.Value) {
				t.Errorf("after %v: %+v", last, m)
			}
			last[m.Topic] = string(m.Value)
		case <-ctx.Done():
			t.Fatalf("got only %v", last)
		}
	}

	cancel()
	<-ended
}
