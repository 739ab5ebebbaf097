package kafkaconnect

import (
	"context"
	"embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/outrelay/outrelay/internal/lab/devstack"
)

// The connectors that this package can fetch.
const (
	Debezium   = "debezium"
	MongoKafka = "mongo-kafka"
)

// connect is Kafka Connect itself.
const connect = "connect"

//go:embed pom/*.xml
var poms embed.FS

// Version returns the version of a connector, or that of Kafka Connect for "connect".
func Version(part string) string {
	pom, err := poms.ReadFile("pom/" + part + ".xml")
	if err != nil {
		return ""
	}
	// The first dependency is the part itself, the others belong to it.
	_, dependencies, _ := strings.Cut(string(pom), "<dependencies>")
	if match := regexp.MustCompile("<version>([^<]+)</version>").FindStringSubmatch(dependencies); match != nil {
		return match[1]
	}
	return ""
}

// Fetch returns the directory with the jars of a part. It fetches them if the cache does not have them.
func Fetch(ctx context.Context, part string) (string, error) {
	pom, err := poms.ReadFile("pom/" + part + ".xml")
	if err != nil {
		return "", fmt.Errorf("fetching a connector: %w", err)
	}

	return devstack.FetchOnce(ctx, "connect-"+part+"-"+Version(part), func(tmp string) error {
		file := filepath.Join(tmp, "pom.xml")
		if err := os.WriteFile(file, pom, 0o600); err != nil {
			return err
		}

		mvn := exec.CommandContext(ctx, "mvn", "-B", "-q", "--strict-checksums", "-f", file,
			"org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies", "-DincludeScope=runtime", "-DoutputDirectory="+filepath.Join(tmp, part))
		if out, err := mvn.CombinedOutput(); err != nil {
			return fmt.Errorf("fetching %s with Maven: %w\n%s", part, err, out)
		}
		return nil
	})
}
