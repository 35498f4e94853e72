package stream

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/hopback/hopback/argument"
)

// FileStore stores each position in a file. Use it for a single process with a disk. Save writes
// another file, syncs it, and renames it, so a crash leaves either the old position or the new
// one. Save returns when the disk has it. It is safe for concurrent use by different consumers
// and streams.
type FileStore struct {
	// Dir is an existing directory. The file names are a hash followed by ".offset". The files
	// contain JSON with the consumer, the stream, and the position. Required.
	Dir string
}

var _ OffsetStore = (*FileStore)(nil)

type positionFile struct {
	Consumer string `json:"consumer"`
	Stream   string `json:"stream"`
	Next     uint64 `json:"next"`
}

func (s *FileStore) path(consumer, stream string) (string, error) {
	if s == nil || s.Dir == "" {
		return "", argument.New("FileStore.Dir", nil, "is empty", "set it to an existing directory")
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%d:%s%s", len(consumer), consumer, stream))
	return filepath.Join(s.Dir, hex.EncodeToString(sum[:])+".offset"), nil
}

// Load reads the position. A file that can't be read is an error, so the consumer doesn't start
// from the beginning.
func (s *FileStore) Load(_ context.Context, consumer, stream string) (uint64, bool, error) {
	path, err := s.path(consumer, stream)
	if err != nil {
		return 0, false, err
	}
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Stat(s.Dir); err != nil {
			return 0, false, err
		}
		return 0, false, nil
	}
	if err != nil {
		return 0, false, err
	}
	var p positionFile
	if err := json.Unmarshal(b, &p); err != nil {
		return 0, false, fmt.Errorf("%s: %w", path, err)
	}
	if p.Consumer != consumer || p.Stream != stream {
		return 0, false, fmt.Errorf("%s belongs to consumer %q and stream %q", path, p.Consumer, p.Stream)
	}
	return p.Next, true, nil
}

// Save writes the position.
func (s *FileStore) Save(_ context.Context, consumer, stream string, next uint64) error {
	path, err := s.path(consumer, stream)
	if err != nil {
		return err
	}
	b, err := json.Marshal(positionFile{consumer, stream, next})
	if err != nil {
		return err
	}
	if err := writeSynced(path+".tmp", append(b, '\n')); err != nil {
		return err
	}
	if err := os.Rename(path+".tmp", path); err != nil {
		return err
	}
	return syncDir(s.Dir)
}

// Delete deletes the position, so that the consumer starts at Config.From again.
func (s *FileStore) Delete(_ context.Context, consumer, stream string) error {
	path, err := s.path(consumer, stream)
	if err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return syncDir(s.Dir)
}

func writeSynced(path string, b []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// syncDir makes a rename last.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
