// A folder with files as sysfs has them. It goes with the test.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "check.hpp"

class Tree {
  public:
    Tree() {
        char name[] = "/tmp/pipemorph-tree-XXXXXX";
        CHECK(::mkdtemp(name) != nullptr);
        root = name;
    }
    ~Tree() { std::filesystem::remove_all(root); }
    Tree(const Tree&) = delete;
    Tree& operator=(const Tree&) = delete;

    void put(const std::string& path, const std::string& text) const {
        std::ofstream(made(path)) << text << "\n";
    }
    // A folder, and at `path` a link to it.
    void link(const std::string& path, const std::string& folder) const {
        std::filesystem::create_directories(root + "/" + folder);
        std::filesystem::create_directory_symlink(root + "/" + folder, made(path));
    }
    std::string root;

  private:
    std::filesystem::path made(const std::string& path) const {
        const std::filesystem::path file = root + "/" + path;
        std::filesystem::create_directories(file.parent_path());
        return file;
    }
};
