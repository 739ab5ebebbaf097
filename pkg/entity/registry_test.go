package entity_test

import (
	"context"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/entity"
)

// A registry of the caller encodes and decodes the entity. NewRegistry can be its basis.
func TestARegistryOfOnesOwn(t *testing.T) {
	t.Parallel()
	type sum struct {
		ID    orderID `bson:"id"`
		Total cents   `bson:"total"`
	}
	w := setup(t)
	r := entity.NewRegistry()
	r.RegisterTypeEncoder(reflect.TypeFor[cents](), bson.ValueEncoderFunc(func(_ bson.EncodeContext, vw bson.ValueWriter, v reflect.Value) error {
		return vw.WriteString(fmt.Sprintf("%d cents", v.Int()))
	}))
	r.RegisterTypeDecoder(reflect.TypeFor[cents](), bson.ValueDecoderFunc(func(_ bson.DecodeContext, vr bson.ValueReader, v reflect.Value) error {
		text, err := vr.ReadString()
		if err != nil {
			return err
		}

		var n int64
		_, err = fmt.Sscanf(text, "%d cents", &n)
		v.SetInt(n)
		return err
	}))

	c, err := entity.New(w.db.Collection("sums"), func(s *sum) *orderID { return &s.ID }, entity.WithRegistry(r))
	if err != nil {
		t.Fatal(err)
	}

	w.tx(func(ctx context.Context) error {
		_, err := c.Insert(ctx, sum{ID: "1", Total: 250})
		return err
	})
	if got := w.listStored("sums"); len(got) != 1 || !strings.Contains(got[0], `"250 cents"`) {
		t.Errorf("stored %s", got)
	}

	w.tx(func(ctx context.Context) error {
		got, err := c.Load(ctx, "1")
		if err == nil && got.Total != 250 {
			t.Errorf("loaded %+v", got)
		}

		return err
	})
}

type cents int64
