package saga_test

import (
	"context"
	"testing"
	"time"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/saga"
)

// quotes requests a price from three shops and uses the best price that arrives in time.
type quotes struct {
	Asked  int
	Best   int
	Winner string
}

type offer struct {
	Shop  string
	Price int
}

func newGather(t *testing.T, p *place) consumer.Handler {
	type instance = saga.Instance[quotes]
	s := saga.Define[quotes]("quotes")
	decide := func(_ context.Context, in *instance) error {
		in.Emit(event.New(event.Aggregate{Type: "quote", ID: in.ID()}, "Chosen", event.Bytes("text/plain", []byte(in.State.Winner))))
		in.Complete()
		return nil
	}
	saga.Start(s, newType[[]string]("Wanted"), func(_ context.Context, in *instance, shops []string) error {
		for _, shop := range shops { // scatter
			in.Emit(event.New(event.Aggregate{Type: "shop", ID: shop}, "Offer", event.Bytes("", []byte(in.ID()))))
		}

		in.State.Asked = len(shops)
		in.TimeoutIn("patience", time.Minute)
		return nil
	})

	saga.On(s, newType[offer]("Offered"), func(ctx context.Context, in *instance, o offer) error {
		if in.State.Winner == "" || o.Price < in.State.Best {
			in.State.Best, in.State.Winner = o.Price, o.Shop
		}

		if in.State.Asked--; in.State.Asked == 0 { // gathered
			return decide(ctx, in)
		}
		return nil
	})

	s.Timeout("patience", decide)
	return handlerOf(t, s, p.box)
}

func TestScatterAndGather(t *testing.T) {
	t.Parallel()
	offered := func(shop string, price int) *consumer.Message {
		return newMessage(t, "Offered", shop, offer{shop, price}, saga.HeaderID, "q")
	}
	for what, answers := range map[string][]*consumer.Message{
		"all answer":    {offered("a", 3), offered("b", 1), offered("c", 2)},
		"one is silent": {offered("b", 1), offered("c", 2)},
	} {
		p := newPlace(t)
		h := newGather(t, p)
		mustHandle(t, h, newMessage(t, "Wanted", "q", []string{"a", "b", "c"}))
		patience := p.listScheduled(t)["quotes.patience"]
		mustHandle(t, h, answers...)
		// The timeout and another answer arrive after all shops have answered.
		mustHandle(t, h, publishedMessage(t, patience), offered("c", 0))
		envelopes, err := p.listEnvelopes(t.Context())
		if err != nil {
			t.Fatal(err)
		}

		chosen := 0
		for _, e := range envelopes {
			if e.Lookup("type").StringValue() == "Chosen" {
				chosen++
				if e.Lookup("payload").StringValue() != "b" {
					t.Errorf("%s: chosen is %s", what, e)
				}
			}
		}

		if chosen != 1 {
			t.Errorf("%s: %d decisions", what, chosen)
		}
	}
}
