package adopt

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// token is a position between two events at 1700000000, 3.
const token = "826553F100000000032B0229296E1404"

func TestOffsetFileOfConnect(t *testing.T) {
	t.Parallel()
	list, err := readOffsetFile("testdata/connect.offsets")
	if err != nil || len(list) != 3 {
		t.Fatalf("%d entries, %v", len(list), err)
	}

	for connector, want := range map[string]connectorOffset{
		"orders": {Kind: Debezium, Partition: `{"server_id":"shop"}`},
		"users":  {Kind: mongoKafka, Partition: "mongodb://m1:27017/shop.users"},
	} {
		got, err := selectOffset(list, connector)
		if err != nil || got.Kind != want.Kind || got.Partition != want.Partition || got.Connector != connector {
			t.Errorf("%s: %+v, %v", connector, got, err)
		}
		at := bson.Timestamp{T: 1700000000, I: 3}
		if got.Position.Token.Data() != token || got.Position.ClusterTime != at {
			t.Errorf("%s: position %+v", connector, got.Position)
		}
	}
	if _, err := selectOffset(list, ""); !errors.Is(err, ErrRejected) || !strings.Contains(err.Error(), "orders, users") {
		t.Errorf("two connectors: %v", err)
	}
	if _, err := selectOffset(list, "gone"); !errors.Is(err, ErrRejected) {
		t.Errorf("a connector whose offset was removed: %v", err)
	}
}

// TestDamagedOffsetFiles: no input makes the parser panic, or allocate memory for a length that the
// input only claims.
func TestDamagedOffsetFiles(t *testing.T) {
	t.Parallel()
	whole, err := os.ReadFile("testdata/connect.offsets")
	if err != nil {
		t.Fatal(err)
	}
	for n := range whole {
		if _, err := parseJavaMap(whole[:n]); !errors.Is(err, errNotOffsets) {
			t.Fatalf("the first %d bytes: %v", n, err)
		}
		damaged := append([]byte(nil), whole...)
		damaged[n] ^= 0xff
		_, _ = parseJavaMap(damaged)
	}

	path := filepath.Join(t.TempDir(), "offsets")
	if err := os.WriteFile(path, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := readOffsetFile(path); !errors.Is(err, errNotOffsets) {
		t.Errorf("a file of JSON: %v", err)
	}
}

func FuzzOffsetFile(f *testing.F) {
	whole, err := os.ReadFile("testdata/connect.offsets")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(whole)
	f.Fuzz(func(_ *testing.T, data []byte) {
		list, _ := parseJavaMap(data)
		_, _ = selectOffset(list, "")
	})
}

func TestRejectedOffsets(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ key, value, want string }{
		"another connector": {`["inventory",{"server":"pg"}]`, `{"lsn":24023128}`, `found inventory {"server":"pg"}`},
		"no connector":      {`{"x":1}`, `{}`, `found {"x":1}`},
		"a snapshot":        {`["c",{"server_id":"shop"}]`, `{"sec":1,"ord":1,"initsync":true}`, "its snapshot is not finished"},
		"a copy":            {`["c",{"ns":"x"}]`, `{"_id":"{\"_id\":1,\"copyingData\":true}","copy":"true"}`, "it is copying the collection"},
		"no token":          {`["c",{"ns":"x"}]`, `{"id":"1"}`, `expected "_id" with a resume token; found {"id":"1"}`},
		"no position":       {`["c",{"server_id":"x"}]`, `{"pos":5}`, `expected "sec", "ord" and "resume_token"; found {"pos":5}`},
		"a bad token":       {`["c",{"server_id":"x"}]`, `{"sec":1,"resume_token":"abc"}`, "expected a resume token"},
		"no JSON":           {`["c",{"server_id":"x"}]`, `sec`, "is not a JSON object: sec"},
	} {
		_, err := selectOffset([]rawOffset{{[]byte(c.key), []byte(c.value)}}, "")
		if !errors.Is(err, ErrRejected) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}

	if _, err := selectOffset(nil, "orders"); err == nil || !strings.Contains(err.Error(), `the connector "orders"`) || !strings.Contains(err.Error(), "found no entry") {
		t.Errorf("no entries: %v", err)
	}
}

// TestDebeziumPositions: the token is BSON in base64 since version 2.2, and its data before. After the start it may be missing.
func TestDebeziumPositions(t *testing.T) {
	t.Parallel()
	for _, value := range []string{
		`{"sec":1700000000,"ord":3,"resume_token":"` + token + `"}`,
		`{"sec":1700000000,"ord":3,"resume_token":"MQAAAAJfZGF0YQAhAAAAODI2NTUzRjEwMDAwMDAwMDAzMkIwMjI5Mjk2RTE0MDQAAA=="}`,
		`{"sec":1700000000,"ord":3}`,
	} {
		o, err := selectOffset([]rawOffset{{[]byte(`["c",{"server_id":"shop"}]`), []byte(value)}}, "")
		if err != nil || o.Position.ClusterTime != (bson.Timestamp{T: 1700000000, I: 3}) {
			t.Errorf("%s: %+v, %v", value, o.Position, err)
		}
	}

	for _, text := range []string{token, strings.ToLower(token), `{"_data": "` + token + `"}`} {
		p, err := parseToken(text)
		if err != nil || p.Token.Data() != token || isEventToken(p.Token) {
			t.Errorf("%s: %+v, %v", text, p, err)
		}
	}
}
