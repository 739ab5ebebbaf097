package resume_test

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/resume"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find))
}

func newPosition(t, i uint32, rest string) resume.Position {
	return resume.Position{
		Token:       resume.TokenOf(fmt.Sprintf("82%08X%08X%s", t, i, rest)),
		ClusterTime: bson.Timestamp{T: t, I: i},
	}
}

func TestTokenClusterTime(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		token resume.Token
		want  bson.Timestamp
		ok    bool
	}{
		{"event", resume.TokenOf("8266A1B2C3000000052B022C0100296E5A1004"), bson.Timestamp{T: 0x66A1B2C3, I: 5}, true},
		{"lower case", resume.TokenOf("8266a1b2c300000005"), bson.Timestamp{T: 0x66A1B2C3, I: 5}, true},
		{"zero", nil, bson.Timestamp{}, false},
		{"short", resume.TokenOf("8266A1B2C30000000"), bson.Timestamp{}, false},
		{"other type", resume.TokenOf("3C66A1B2C300000005"), bson.Timestamp{}, false},
		{"not hex", resume.TokenOf("82zzA1B2C300000005"), bson.Timestamp{}, false},
		{"no time", resume.TokenOf("820000000000000005"), bson.Timestamp{}, false},
		{"garbage", resume.Token("garbage"), bson.Timestamp{}, false},
		{"other document", mustMarshal(t, bson.D{{Key: "_data", Value: 7}}), bson.Timestamp{}, false},
	} {
		if got, ok := c.token.ClusterTime(); got != c.want || ok != c.ok {
			t.Errorf("%s: got %v %v, want %v %v", c.name, got, ok, c.want, c.ok)
		}
	}
}

// MongoDB 7.0 writes another version of tokens than 6.0. After a change of the version in the middle of a transaction, the numbers of the
// operations show which of them were read.
func TestTokensOfTwoVersionsAreComparedByTheirOperation(t *testing.T) {
	t.Parallel()
	const uuid = "6E5A1004F905307258A64E45BCB430ACFBC8238C"
	const v1, v2, event, watermark = "2B02", "2B04", "2C0100", "29"
	ids := map[string]string{
		v1: uuid + "46645F696400646B0C9561BBE3CBFE0AADCD8C0004",
		v2: uuid + "463C6F7065726174696F6E54797065003C696E736572740046646F63756D656E744B65790046645F696400646B0C9561BBE3CBFE0AADCD8C000004",
	}

	type place struct {
		time         uint32
		kind, number string
	}
	for name, c := range map[string]struct {
		a, b place
		want int
	}{
		"the same operation":                      {place{100, event, "2B0A"}, place{100, event, "2B0A"}, 0},
		"an earlier operation of the transaction": {place{100, event, "29"}, place{100, event, "2B0A"}, -1},
		"a number of two bytes":                   {place{100, event, "2BFE"}, place{100, event, "2C0190"}, -1},
		"an earlier time":                         {place{99, event, "2C0190"}, place{100, event, "29"}, -1},
		"the start of the time":                   {place{100, watermark, "29"}, place{100, event, "29"}, -1},
	} {
		for _, versions := range [][2]string{{v1, v2}, {v2, v1}, {v1, v1}, {v2, v2}} {
			position := func(p place, version string) resume.Position {
				return newPosition(p.time, 1, version+p.kind+p.number+ids[version])
			}
			a, b := position(c.a, versions[0]), position(c.b, versions[1])
			if a.Compare(b) != c.want || b.Compare(a) != -c.want {
				t.Errorf("%s, versions %v: got %d and %d, want %d", name, versions, a.Compare(b), b.Compare(a), c.want)
			}
		}
	}

	// A token in an unknown format is compared by its time.
	later := newPosition(101, 1, v1+event+"29")
	for _, rest := range []string{"", "2B", v2, v2 + "2C", "zzzzzz", v2 + "FF"} {
		if got := newPosition(100, 1, rest).Compare(later); got != -1 {
			t.Errorf("%q: got %d, want -1", rest, got)
		}
	}
}

func TestPositionOrder(t *testing.T) {
	t.Parallel()
	order := []resume.Position{
		{},
		{ClusterTime: bson.Timestamp{T: 100, I: 1}},
		newPosition(100, 1, "29"),
		newPosition(100, 1, "2B022C0100"),
		newPosition(100, 2, "29"),
		{ClusterTime: bson.Timestamp{T: 0x9ABCDEF0, I: 1}},
		newPosition(0x9ABCDEF0, 1, "29"),
	}

	for i, p := range order {
		for j, q := range order {
			if got, want := p.Compare(q), cmpInt(i, j); got != want {
				t.Errorf("Compare(%d, %d) = %d, want %d", i, j, got, want)
			}
		}
	}

	if ts, ok := (resume.Position{Token: newPosition(7, 8, "29").Token}).Time(); !ok ||
		ts != (bson.Timestamp{T: 7, I: 8}) {
		t.Errorf("Time of a position with only a token = %v %v", ts, ok)
	}

	if !(resume.Position{}).IsZero() || order[1].IsZero() {
		t.Error("IsZero is wrong")
	}
}

func cmpInt(i, j int) int {
	switch {
	case i < j:
		return -1
	case i > j:
		return 1
	}
	return 0
}

func TestTokenIsStoredAsItsDocument(t *testing.T) {
	t.Parallel()
	in := newPosition(5, 6, "29")
	raw := mustMarshal(t, in)
	if got := bson.Raw(raw).Lookup("token", "_data").StringValue(); got != in.Token.Data() {
		t.Errorf("stored token._data is %q", got)
	}

	var out resume.Position
	if err := bson.Unmarshal(raw, &out); err != nil {
		t.Fatal(err)
	}

	if diff := cmp.Diff(in, out); diff != "" {
		t.Error(diff)
	}

	raw = mustMarshal(t, resume.Position{})
	if typ := bson.Raw(raw).Lookup("token").Type; typ != bson.TypeNull {
		t.Errorf("a zero token is stored as %s", typ)
	}

	if err := bson.Unmarshal(raw, &out); err != nil || !out.IsZero() {
		t.Errorf("zero position reads as %v, %v", out, err)
	}

	var tok resume.Token
	if err := tok.UnmarshalBSONValue(byte(bson.TypeString), []byte{1, 0, 0, 0, 0}); err == nil {
		t.Error("a token was decoded from a string")
	}

	if _, _, err := resume.Token("garbage").MarshalBSONValue(); err == nil {
		t.Error("an invalid token was encoded")
	}
}

// A token of the server must pass through the type unchanged and contain the time that was sent
// with it.
func TestTokenOfRealStream(t *testing.T) {
	t.Parallel()
	coll := stacktest.Database(t, stacktest.Client(t)).Collection("c")
	cs, err := coll.Watch(t.Context(), mongo.Pipeline{})
	if err != nil {
		t.Fatal(err)
	}

	defer cs.Close(t.Context())
	var last resume.Position
	for i := range 3 {
		if _, err := coll.InsertOne(t.Context(), bson.D{{Key: "i", Value: i}}); err != nil {
			t.Fatal(err)
		}
		if !cs.Next(t.Context()) {
			t.Fatal(cs.Err())
		}

		sec, inc := cs.Current.Lookup("clusterTime").Timestamp()
		pos := resume.Position{
			Token:       resume.Token(cs.Current.Lookup("_id").Document()).Clone(),
			ClusterTime: bson.Timestamp{T: sec, I: inc},
		}
		if got, ok := pos.Token.ClusterTime(); !ok || got != pos.ClusterTime {
			t.Errorf("ClusterTime = %v, want the server's %v", got, pos.ClusterTime)
		}

		if pos.Compare(last) <= 0 {
			t.Errorf("position %d is not after the previous position", i)
		}

		last = pos
	}

	again, err := coll.Watch(t.Context(), mongo.Pipeline{}, options.ChangeStream().SetResumeAfter(bson.Raw(last.Token)))
	if err != nil {
		t.Fatalf("resuming with the token: %v", err)
	}

	_ = again.Close(t.Context())
}

// Tokens come from a database, so no bytes may cause a panic.
func TestTokenOfAnyBytes(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		tok := resume.Token(rapid.SliceOf(rapid.Byte()).Draw(t, "bytes"))
		_ = tok.Data()
		_, _ = tok.ClusterTime()
		_, _, _ = tok.MarshalBSONValue()
	})
}

func mustMarshal(t *testing.T, v any) []byte {
	t.Helper()
	raw, err := bson.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func TestAPositionWhoseTokenIsNotSoundGoesByItsTime(t *testing.T) {
	t.Parallel()
	at := bson.Timestamp{T: 0x65000000, I: 7}
	of := func(data string) resume.Position {
		return resume.Position{Token: resume.TokenOf(data), ClusterTime: at}
	}

	good, before, after := of("8265000000000000070004"), of("8265000000000000060004"), of("8265000000000000080004")
	after.ClusterTime.I = 8
	for name, c := range map[string]struct {
		p     resume.Position
		sound bool
	}{
		"its own":            {good, true},
		"none":               {resume.Position{ClusterTime: at}, true},
		"without a time":     {resume.Position{Token: resume.TokenOf("xyz")}, true},
		"garbage":            {of("xyz"), false},
		"cut off":            {of("82"), false},
		"of an earlier time": {before, false},
		"of a later time":    {of("82650000FF000000070004"), false},
	} {
		if c.p.Sound() != c.sound {
			t.Errorf("%s: Sound = %v", name, !c.sound)
		}

		if !c.sound && (c.p.Compare(good) >= 0 || c.p.Compare(after) >= 0 ||
			c.p.Compare(resume.Position{ClusterTime: at}) != 0) {
			t.Errorf("%s: does not compare by its cluster time", name)
		}
	}
}
