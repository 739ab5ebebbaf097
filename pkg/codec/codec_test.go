package codec_test

import (
	"bytes"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/pkg/codec"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type order struct {
	Total int64     `json:"total" bson:"sum"`
	Note  string    `json:"note,omitempty" bson:"note,omitempty"`
	At    time.Time `json:"at,omitzero" bson:"at,omitempty"`
}

type text string

func TestJSONUsesItsTagsAndEscapesNoHTML(t *testing.T) {
	t.Parallel()
	c := codec.JSON()
	out, err := c.Encode(order{Total: 5, Note: "<a href='x'>&</a>"})
	if err != nil || string(out) != `{"total":5,"note":"<a href='x'>&</a>"}` {
		t.Errorf("encoded %s, %v", out, err)
	}

	var back order
	if err := c.Decode(t.Context(), []byte(`{"total":7,"added":"later"}`), &back); err != nil || back.Total != 7 {
		t.Errorf("decoded %+v, %v", back, err)
	}
	if err := c.Decode(t.Context(), []byte(`{"total":"7"}`), &back); err == nil {
		t.Error("a text was decoded as a number")
	}
	if _, err := c.Encode(make(chan int)); err == nil {
		t.Error("a channel was encoded")
	}
}

func TestExtJSONUsesBSONTags(t *testing.T) {
	t.Parallel()
	c := codec.ExtJSON()
	in := order{Total: 5, Note: "<&>", At: time.UnixMilli(1_700_000_000_000).UTC()}
	out, err := c.Encode(in)
	if err != nil || string(out) != `{"sum":5,"note":"<&>","at":{"$date":"2023-11-14T22:13:20Z"}}` {
		t.Errorf("encoded %s, %v", out, err)
	}

	var back order
	if err := c.Decode(t.Context(), out, &back); err != nil || !cmp.Equal(in, back) {
		t.Errorf("decoded %+v, %v", back, err)
	}
	if out, err := c.Encode(bson.A{1, "x"}); err != nil || string(out) != `[1,"x"]` {
		t.Errorf("array: %s, %v", out, err)
	}
	for _, v := range []any{5, "text", nil, make(chan int)} {
		if out, err := c.Encode(v); err == nil {
			t.Errorf("%T was encoded as %s", v, out)
		}
	}
}

func TestRawPassesBytesAndTextThrough(t *testing.T) {
	t.Parallel()
	c := codec.Raw("")
	if got := c.ContentType() + " " + codec.Raw("text/csv").ContentType(); got != "application/octet-stream text/csv" {
		t.Errorf("content types: %s", got)
	}

	in := []byte{0, 255, 1}
	for _, v := range []any{in, bson.Raw(in), string(in), text(in)} {
		out, err := c.Encode(v)
		if err != nil || !bytes.Equal(out, in) {
			t.Errorf("%T: encoded %x, %v", v, out, err)
		}
	}
	out, _ := c.Encode(in)
	out[0] = 9
	if in[0] == 9 {
		t.Error("the payload shares memory with the value")
	}

	var b []byte
	var s text
	if err := c.Decode(t.Context(), in, &b); err != nil || !bytes.Equal(b, in) {
		t.Errorf("decoded %x, %v", b, err)
	}
	if err := c.Decode(t.Context(), in, &s); err != nil || s != text(in) {
		t.Errorf("decoded %q, %v", s, err)
	}
	b[0] = 9
	if in[0] == 9 {
		t.Error("the value shares memory with the payload")
	}

	if _, err := c.Encode(5); err == nil {
		t.Error("a number was encoded")
	}
	for _, into := range []any{nil, "x", new(int), (*string)(nil)} {
		if err := c.Decode(t.Context(), in, into); err == nil {
			t.Errorf("%T: no error", into)
		}
	}
}
