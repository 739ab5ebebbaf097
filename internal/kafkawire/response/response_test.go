package response_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/describeconfigs"
	"github.com/segmentio/kafka-go/protocol/findcoordinator"
	"github.com/segmentio/kafka-go/protocol/initproducerid"
	"github.com/segmentio/kafka-go/protocol/listoffsets"
	"github.com/segmentio/kafka-go/protocol/metadata"
	"github.com/segmentio/kafka-go/protocol/saslauthenticate"
	"github.com/segmentio/kafka-go/protocol/saslhandshake"
	"github.com/segmentio/kafka-go/protocol/syncgroup"
	"pgregory.net/rapid"

	"github.com/outrelay/outrelay/internal/kafkawire/response"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

func dial(ctx context.Context, network, addr string) (net.Conn, error) {
	nc, err := (&net.Dialer{}).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return response.Check(nc, bufio.NewReader(nc), addr), nil
}

// checkAllocation fails the test if f allocates as much as a hostile response claims.
func checkAllocation(t *testing.T, f func()) {
	t.Helper()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	if grown := after.TotalAlloc - before.TotalAlloc; grown > 16<<20 {
		t.Errorf("%d bytes were allocated", grown)
	}
}

// Not parallel: it measures allocations.
func TestHostileResponseAllocatesNothingAndNamesTheBroker(t *testing.T) {
	huge := stacktest.HugeArray
	for name, c := range map[string]struct {
		req     protocol.Message
		version int16
		body    []byte
	}{
		"brokers of a cluster":       {&metadata.Request{}, 8, huge(4)},
		"topics of a cluster":        {&metadata.Request{}, 1, append([]byte{0, 0, 0, 0, 0, 0, 0, 0}, huge(0)...)},
		"offsets":                    {&listoffsets.Request{}, 5, huge(4)},
		"configurations":             {&describeconfigs.Request{}, 3, huge(4)},
		"a string":                   {&findcoordinator.Request{}, 2, []byte{0, 0, 0, 0, 0, 0, 0x7f, 0xff, 'x'}},
		"tags of a header":           {&initproducerid.Request{}, 4, bytes.Repeat([]byte{0xff}, 9)},
		"size of a tag":              {&initproducerid.Request{}, 4, []byte{1, 0, 0xff, 0xff, 0xff, 0xff, 0x7f}},
		"mechanisms":                 {&saslhandshake.Request{}, 1, huge(2)},
		"bytes of an authentication": {&saslauthenticate.Request{}, 1, huge(4)},
		"partitions of a member":     {&syncgroup.Request{}, 0, append([]byte{0, 0, 0, 0, 0, 6}, huge(2)...)},
		"a negative length":          {&metadata.Request{}, 8, append(make([]byte, 4), 0xff, 0xff, 0xff, 0xff)},
		"nothing at all":             {&metadata.Request{}, 8, []byte{}},
	} {
		t.Run(name, func(t *testing.T) {
			addr := stacktest.Hostile(t, func(int16, int16) []byte { return c.body })

			nc, err := dial(t.Context(), "tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = nc.Close() }()
			pc := protocol.NewConn(nc, "test")
			pc.SetVersions(map[protocol.ApiKey]int16{c.req.ApiKey(): c.version, protocol.SaslHandshake: max(c.version, 1)})

			checkAllocation(t, func() { _, err = pc.RoundTrip(c.req) })
			if !errors.Is(err, response.ErrNotKafka) || !strings.Contains(err.Error(), addr) {
				t.Errorf("%v", err)
			}
		})
	}
}

// kafka-go connects on its own, and consumer groups use its older connections with another decoder. Not parallel: it
// measures allocations.
func TestHostileBrokerMeetsEveryClientOfKafkaGo(t *testing.T) {
	for name, addr := range map[string]string{
		"versions": stacktest.Hostile(t, stacktest.HugeVersions),
		"metadata": stacktest.Hostile(t, stacktest.HugeMetadata),
		"web":      stacktest.WebServer(t),
	} {
		rejected := func(t *testing.T, err error) {
			t.Helper()
			if !errors.Is(err, response.ErrNotKafka) || !strings.Contains(err.Error(), addr) {
				t.Errorf("%v", err)
			}
		}

		t.Run(name+"/transport", func(t *testing.T) {
			tr := &kafka.Transport{Dial: dial}
			defer tr.CloseIdleConnections()
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			checkAllocation(t, func() {
				_, err := (&kafka.Client{Addr: kafka.TCP(addr), Transport: tr}).Metadata(ctx, &kafka.MetadataRequest{Topics: []string{"a"}})
				rejected(t, err)
			})
		})

		t.Run(name+"/group", func(t *testing.T) {
			d := &kafka.Dialer{DialFunc: dial}
			c, err := d.DialContext(t.Context(), "tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = c.Close() }()
			checkAllocation(t, func() {
				_, err := c.ReadPartitions("a")
				rejected(t, err)
			})
		})
	}
}

func TestSASLWithoutFramesIsRejected(t *testing.T) {
	t.Parallel()
	addr := stacktest.Hostile(t, func(int16, int16) []byte { return make([]byte, 10) })
	nc, err := dial(t.Context(), "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = nc.Close() }()
	if _, err := protocol.NewConn(nc, "test").RoundTrip(&saslhandshake.Request{Mechanism: "PLAIN"}); !errors.Is(err, response.ErrOldSASL) {
		t.Errorf("%v", err)
	}
}

func TestTLSAlertIsNamed(t *testing.T) {
	t.Parallel()
	client, server := net.Pipe()
	defer func() { _ = client.Close() }()
	go func() {
		_, _ = server.Write([]byte{0x15, 3, 1, 0, 2, 2, 70})
		_ = server.Close()
	}()
	if _, err := response.Check(client, bufio.NewReader(client), "b:1").Read(make([]byte, 8)); !errors.Is(err, response.ErrTLS) {
		t.Errorf("%v", err)
	}
}

// requests and responses of all APIs and versions that are used, filled at random: kafka-go's own encoder writes the response, and
// its decoder has to get the same bytes through the check.
func TestEveryResponseOfABrokerPasses(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		key := rapid.SampledFrom(slices.Sorted(response.Keys())).Draw(t, "key")
		version := rapid.Int16Range(key.MinVersion(), key.MaxVersion()).Draw(t, "version")
		if key == protocol.SaslHandshake {
			version = 1
		}

		msg := reflect.New(response.TypeOf(key))
		drawValue(t, msg.Elem())
		if s, ok := msg.Interface().(*syncgroup.Response); ok {
			s.Assignments, _ = protocol.Marshal(0, assignment{Topics: []assigned{{"t", []int32{1, 2}}}})
		}

		var wire bytes.Buffer
		if err := protocol.WriteResponse(&wire, version, 7, msg.Interface().(protocol.Message)); err != nil {
			t.Fatal(err)
		}

		client, server := net.Pipe()
		defer func() { _ = client.Close() }()
		go func() {
			_, _ = server.Read(make([]byte, 100))
			_, _ = server.Write(wire.Bytes())
			_ = server.Close()
		}()

		checked := response.Check(client, bufio.NewReader(client), "b:1")
		request := binary.BigEndian.AppendUint32(nil, 8)
		request = binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(request, uint16(key)), uint16(version))
		if _, err := checked.Write(binary.BigEndian.AppendUint32(request, 7)); err != nil {
			t.Fatal(err)
		}

		id, _, err := protocol.ReadResponse(bufio.NewReader(checked), key, version)
		if err != nil || id != 7 {
			t.Fatalf("%v version %d: correlation %d, %v", key, version, id, err)
		}
	})
}

type assignment struct {
	Version  int16      `kafka:"min=v0,max=v0"`
	Topics   []assigned `kafka:"min=v0,max=v0"`
	UserData []byte     `kafka:"min=v0,max=v0"`
}

type assigned struct {
	Topic      string  `kafka:"min=v0,max=v0"`
	Partitions []int32 `kafka:"min=v0,max=v0"`
}

func drawValue(t *rapid.T, v reflect.Value) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Field(i).CanSet() {
				drawValue(t, v.Field(i))
			}
		}
	case reflect.Slice:
		n := rapid.IntRange(0, 3).Draw(t, "n")
		v.Set(reflect.MakeSlice(v.Type(), n, n))
		for i := range n {
			drawValue(t, v.Index(i))
		}
	case reflect.String:
		v.SetString(rapid.StringMatching("[a-z]{0,9}").Draw(t, "s"))
	case reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		v.SetInt(rapid.Int64Range(-1, 100).Draw(t, "i"))
	}
}
